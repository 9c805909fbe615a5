import pytest

from moet_cli.options import OPTIONS
from moet_cli.recipe import Suite, load_recipe, load_suite, recipe_names
from moet_core.errors import ConfigError, UsageError


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a recipe from a text."""

    def load_text(text):
        (tmp_path / "mine.yaml").write_text(text)
        return load_recipe(str(tmp_path / "mine.yaml"))

    return load_text


class TestShipped:
    @pytest.mark.parametrize("name", recipe_names())
    def test_every_recipe_loads_and_names_a_model(self, name):
        recipe = load_recipe(name)
        assert recipe.options["model"]
        assert recipe.options.keys() <= OPTIONS.keys()

    def test_demo_needs_no_gpu_and_demo_gpu_needs_one(self):
        assert load_recipe("demo").requires.gpus == 0
        assert load_recipe("demo-gpu").requires.gpus == 1

    def test_quick_suite_loads(self):
        assert isinstance(load_suite("quick"), Suite)


class TestUnknownNames:
    def test_recipe(self):
        with pytest.raises(
            UsageError, match=r"recipe 'demmo'; did you mean 'demo'\? There are: demo"
        ):
            load_recipe("demmo")

    def test_suite(self):
        with pytest.raises(UsageError, match=r"suite 'quik'; did you mean 'quick'"):
            load_suite("quik")


class TestStrictness:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("sumary: x\noptions: {}", r"key 'sumary'; did you mean 'summary'"),
            ("summary: x\noptions: {}\nrequires: {gpu: 1}", r"key 'gpu'; did you mean 'gpus'"),
            ("summary: x\noptions: {dtipe: auto}", r"option 'dtipe'; did you mean 'dtype'"),
            ("summary: x\noptions: {port: '80'}", r"Option 'port' .*Expected `int`, got `str`"),
            ("summary: x", "missing required field `options`"),
            ("- x", "Expected `object`, got `array`"),
            ("a: [", "not YAML"),
        ],
    )
    def test_errors_name_the_file_and_what_is_wrong(self, load, text, reason):
        with pytest.raises(ConfigError, match=rf"mine\.yaml: (?s:.*){reason}"):
            load(text)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read: No such file"):
            load_recipe(str(tmp_path / "no.yaml"))
