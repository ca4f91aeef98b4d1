"""The command line of `hfpar data`, taken apart."""

import subprocess
import sys

import pytest

from hfpar.config.schema import DataSource
from hfpar.datatool.main import Arguments, read_config, split_arguments
from hfpar.errors import ConfigError

FLAGS = {"json": False, "plot": True}


@pytest.mark.parametrize(
    ("words", "paths", "flags", "settings"),
    [
        ("a b", "a b", {}, ""),
        ("a --json b", "a b", {"json": ""}, ""),
        ("--plot x.png a", "a", {"plot": "x.png"}, ""),
        ("--plot=x.png a", "a", {"plot": "x.png"}, ""),
        ("--config c.yaml a", "a", {}, "--config c.yaml"),
        ("--max_length 3 a --json", "a", {"json": ""}, "--max_length 3"),
        ("--max_length=3 a", "a", {}, "--max_length=3"),
        ("a --dataset_columns x=y z=w --json b", "a b", {"json": ""}, "--dataset_columns x=y z=w"),
        ("--dataset a b", "", {}, "--dataset a b"),
        ("--streaming --max_steps 3 a", "a", {}, "--streaming --max_steps 3"),
    ],
)
def test_words_go_where_they_belong(words, paths, flags, settings):
    expected = Arguments(paths.split(), flags, settings.split())
    assert split_arguments(words.split(), FLAGS) == expected


def test_paths_take_the_place_of_the_config_s_data(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("dataset: [{path: a.jsonl, weight: 2}]\neval_dataset: e.jsonl\nmax_length: 7\n")
    words = ["--config", str(file)]
    config = read_config(split_arguments(words, FLAGS))
    assert config.dataset == [DataSource(path="a.jsonl", weight=2)]
    config = read_config(split_arguments([*words, "[b].jsonl"], FLAGS))
    assert (config.dataset, config.eval_dataset, config.max_length) == (["[b].jsonl"], "e.jsonl", 7)


def test_an_empty_path_is_refused():
    with pytest.raises(ConfigError, match="dataset: .* is empty"):
        read_config(Arguments(paths=[""]))


@pytest.mark.parametrize(
    "words", [["--help"], ["check", "--help"], ["show", "--help"], ["decontaminate", "--help"]]
)
def test_help_loads_nothing_heavy(words):
    code = (
        "import sys\nfrom hfpar.datatool.main import main\n"
        f"assert main({words!r}) == 0\n"
        "sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
