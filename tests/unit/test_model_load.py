"""Finding a model's parts, before its weights load."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.train.model import find_model


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_neox", "llama"])
def test_a_folder_without_tokenizer_is_refused(family: str, tmp_path: Path) -> None:
    """Transformers makes up an empty one for families that it knows; Gemma's turns every text into unknown tokens."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    expected = f"^model_name_or_path: {tmp_path} has no usable tokenizer: it has no tokenizer.json"
    with pytest.raises(ConfigError, match=expected):
        find_model(SFTConfig(model_name_or_path=str(tmp_path)))


def test_words_need_no_latin_letters(tmp_path: Path) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    core = Tokenizer(models.WordLevel({"GATTACA": 0, "TATA": 1}))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    assert find_model(SFTConfig(model_name_or_path=str(tmp_path))).tokenizer("TATA").input_ids == [1]
