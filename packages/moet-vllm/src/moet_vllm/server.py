"""`python -m moet_vllm.server serve MODEL ...`: vLLM's command line, its children watched."""

from moet_vllm import watch

__all__ = ["main"]


def main() -> None:
    """Run vLLM's command line in this process."""
    from vllm.entrypoints.cli.main import main as vllm_main

    watch.start()
    vllm_main()


if __name__ == "__main__":
    main()
