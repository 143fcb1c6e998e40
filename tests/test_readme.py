import re
import tomllib
from pathlib import Path

import pytest

from coterie import config

ROOT = Path(__file__).parents[1]


def test_the_example_of_the_readme_runs_and_finds_the_two_kinds_of_clients(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(code[1], names)
    accuracy, clusters = capsys.readouterr().out.split(maxsplit=1)
    found = [int(label) for label in re.findall(r"\d+", clusters)]
    assert float(accuracy) > 0.9  # alone, a client of 90 digits reaches about 85 %
    assert found[0] != found[20]
    assert found == [found[0]] * 20 + [found[20]] * 20


@pytest.mark.parametrize(("page", "method"), [("README.md", "fedcbo"), ("docs/language.md", "cobo")])
def test_the_toml_example_of_a_page_is_a_configuration(page, method):
    text = re.search(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert text is not None
    assert config.parse(tomllib.loads(text[1])).shown == method


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").rglob("*.toml")), ids=lambda file: file.stem)
def test_every_experiment_is_a_configuration(file):
    """With its comparison's methods, if it has some; the data need not be there."""
    assert config.parse(config.read(file)).rounds > 1
