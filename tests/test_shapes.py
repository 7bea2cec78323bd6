"""Every file in configs/shapes/ builds the model it is named after, to the last parameter.

python -m pytest tests/test_shapes.py
"""

import shutil

import pytest
import torch
from shell import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

PATHS = sorted((ROOT / "configs/shapes").glob("*.json"))
PUBLISHED = {  # parameters as each model's hub page counts them; tied weights count once
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-4b": 3_880_263_168,  # of 4,300,079,472, less the vision tower and its projector
    "glm-4-9b": 9_399_951_360,
    "gpt-oss-20b": 20_914_757_184,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "minicpm-v-2.6": 7_612_763_648,  # of 8,099,175,152, less the vision tower and its resampler
    "minicpm-v-4.6": 1_300_428_016,  # the page says 1.3 billion; these are ours
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3-mini": 3_821_079_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_shape_has_the_published_number_of_parameters(path, tmp_path):
    shutil.copy(path, tmp_path / "config.json")
    config = AutoConfig.from_pretrained(tmp_path)
    sees = config.architectures[0].endswith("ForConditionalGeneration")
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)
    assert config.architectures == [type(model).__name__]
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in model.parameters()) == PUBLISHED[path.stem]


def test_every_shape_has_a_published_number():
    assert [path.stem for path in PATHS] == sorted(PUBLISHED)
