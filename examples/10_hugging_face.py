"""Train a small GPT-2 of Hugging Face on a sonnet, on one replica and on two: the same bits.

Run it with ``python examples/10_hugging_face.py``; it needs `transformers`, and no network.
"""

from __future__ import annotations

import hashlib
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import phalanx

SONNET = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade
Nor lose possession of that fair thou ow'st;
Nor shall Death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee."""
EPOCHS = 50


def make_tokenizer(lines: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Learn 300 pieces of words from the lines."""
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[PAD]", "[END]"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(lines, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[PAD]", eos_token="[END]"
    )


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.GPT2LMHeadModel(config)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss: its mean over the tokens of a microbatch."""
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def num_tokens(batch: dict[str, Tensor]) -> Tensor:
    """Count what that mean counts: every token that is no padding, but each line's first."""
    return (batch["labels"][:, 1:] != -100).sum()


def train(replicas: int, lines: list[str]) -> tuple[Any, Any, str]:
    """Return the tokenizer, the trained model and the hash of its weights."""
    tokenizer = make_tokenizer(lines)
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    samples = [tokenizer(line + "[END]") for line in lines]
    model = make_model(tokenizer)
    loader = DataLoader(samples, batch_size=7, shuffle=True, collate_fn=collator)
    with phalanx.Trainer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        scheduler=lambda optimizer: transformers.get_cosine_schedule_with_warmup(
            optimizer, 5, EPOCHS * len(loader)
        ),
        scheduler_interval="step",
        forward=forward,
        weight=num_tokens,
        replicas=replicas,
        microbatches=4,
        clip_norm=1.0,
    ) as trainer:
        epochs = trainer.fit(loader, epochs=EPOCHS)
    print(
        f"{replicas} replica(s): loss {epochs[0].train['loss']:.3f} in the first epoch, "
        f"{epochs[-1].train['loss']:.3f} in the last"
    )
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return tokenizer, model, hashlib.sha256(weights).hexdigest()[:16]


def main() -> None:
    lines = SONNET.splitlines()
    _, _, one = train(1, lines)
    tokenizer, model, two = train(2, lines)
    print(f"weights: {one} and {two}, the same bits: {one == two}")

    beginning = tokenizer("Shall I", return_tensors="pt")
    written = model.eval().generate(**beginning, max_new_tokens=30, do_sample=False)
    print(f"it goes on: {tokenizer.decode(written[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
