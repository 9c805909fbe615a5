import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_prints_what_the_readme_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output
