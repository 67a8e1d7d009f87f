# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights that take pictures, with their processors.

Their processors need PIL alone: vLLM runs them where torchvision is not installed.
"""

from __future__ import annotations

from pathlib import Path

import transformers

from vllm_choreo.testing.models.tiny import TINY_LLAMA_SIZES, make_tiny_model, make_tokenizer

_TILE = 56  # pixels
_TILES = 2  # in a row or column, at most
IMAGE = "<image>"


def _idefics3() -> transformers.PretrainedConfig:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _TILE,
        "patch_size": 14,
    }
    words = len(make_tokenizer())
    return transformers.Idefics3Config(
        vision_config=vision,
        text_config={**TINY_LLAMA_SIZES, "model_type": "llama", "vocab_size": words + 8},
        image_token_id=words,
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def make_idefics3(folder: Path) -> Path:
    """Write a tiny Idefics3 to `folder / "idefics3"`: plain RoPE, pictures of 19 to 31 tokens.

    A picture is cut into tiles of four tokens, two or four by its shape, and seen as a whole
    besides. The tokenizer has the words of the other tiny models, then `<image>` and its like.
    """
    path = make_tiny_model("idefics3", folder, config=_idefics3())
    tokenizer = make_tokenizer(whole_words=True)
    places = [f"<row_{row + 1}_col_{col + 1}>" for row in range(_TILES) for col in range(_TILES)]
    around = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    tokenizer.add_tokens([IMAGE, *around, *places], special_tokens=True)
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": _TILE * _TILES}, max_image_size={"longest_edge": _TILE}
    )
    transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4).save_pretrained(
        path
    )
    return path


def _paddleocr_vl() -> transformers.PretrainedConfig:
    words = len(make_tokenizer())
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _TILE,
        "patch_size": 14,
    }
    return transformers.PaddleOCRVLConfig(
        text_config={
            **TINY_LLAMA_SIZES,
            "head_dim": 32,
            "rope_parameters": rope,
            "vocab_size": words + 1,
        },
        vision_config=vision,
        image_token_id=words,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def make_paddleocr_vl(folder: Path) -> Path:
    """Write a tiny PaddleOCR-VL to `folder / "paddleocr_vl_pictured"`: M-RoPE, grids of any shape.

    A picture of 112 by 56 pixels takes 8 tokens, and 4 positions.
    """
    path = make_tiny_model("paddleocr_vl_pictured", folder, config=_paddleocr_vl())
    tokenizer = make_tokenizer(whole_words=True, image_token=IMAGE)
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
    image_processor = transformers.PaddleOCRVLImageProcessorPil(size=pixels)
    transformers.PaddleOCRVLProcessor(image_processor, tokenizer).save_pretrained(path)
    return path


# Each writes a model to a folder of its name.
PICTURED_MODELS = {"idefics3": make_idefics3, "paddleocr_vl_pictured": make_paddleocr_vl}
