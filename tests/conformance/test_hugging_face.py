"""Models and collators of Hugging Face, made from small configs: nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import phalanx
from phalanx import UnsupportedError
from tests.zoo import plain_sgd as sgd

pytestmark = pytest.mark.promise("whole-batch-gradients")

transformers = pytest.importorskip("transformers", reason="needs transformers (extra `peers`)")
tokenizers = pytest.importorskip("tokenizers", reason="needs transformers (extra `peers`)")

LINES = [
    "the cat sat on the mat",
    "a dog",
    "birds fly over the hills and far away today",
    "one two three",
    "hi",
    "some more text to read in the evening by the fire",
    "the end",
]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
BERT = {**SMALL, "intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0}
PRESERVING = {"use_reentrant": False, "context_fn": phalanx.preserve_rng}


def make_tokenizer() -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=list(special.values()))
    words.train_from_iterator(LINES, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


TOKENIZER = make_tokenizer()
SIZE = len(TOKENIZER)


def gpt2(dropout: float = 0.1) -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": SIZE}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **rates))


def llama(dropout: float = 0.1) -> nn.Module:
    more = {"num_key_value_heads": 1, "intermediate_size": 24, "attention_dropout": dropout}
    config = transformers.LlamaConfig(
        vocab_size=SIZE, pad_token_id=0, max_position_embeddings=16, **SMALL, **more
    )
    return transformers.LlamaForCausalLM(config)


def bert_config(dropout: float) -> Any:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return transformers.BertConfig(vocab_size=SIZE, num_labels=3, **BERT, **rates)


def masked(dropout: float = 0.1) -> nn.Module:
    return transformers.BertForMaskedLM(bert_config(dropout))


def classifier(dropout: float = 0.1) -> nn.Module:
    return transformers.BertForSequenceClassification(bert_config(dropout))


def num_predicted(batch: Any) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def num_masked(batch: Any) -> Tensor:
    return (batch["labels"] != -100).sum()


def num_rows(batch: Any) -> int:
    return len(batch["labels"])


Case = tuple[Callable[..., nn.Module], str, Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "gpt2": (gpt2, "causal", num_predicted),
    "llama": (llama, "causal", num_predicted),
    "masked": (masked, "masked", num_masked),
    "classifier": (classifier, "padding", num_rows),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_loader(kind: str, batch_size: int = 4) -> DataLoader[Any]:
    """Batches of 4 and 3 lines, each padded to its longest."""
    language = transformers.DataCollatorForLanguageModeling
    collate = {
        "causal": language(TOKENIZER, mlm=False),
        "masked": language(TOKENIZER, mlm=True, mlm_probability=0.5, seed=7),
        "padding": transformers.DataCollatorWithPadding(TOKENIZER),
    }[kind]
    samples = [dict(TOKENIZER(line)) for line in LINES]
    if kind == "padding":
        samples = [{**each, "label": index % 3} for index, each in enumerate(samples)]
    return DataLoader(samples, batch_size=batch_size, collate_fn=collate)


def forward(module: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    assert isinstance(batch, transformers.BatchEncoding)  # in every microbatch, as it was collated
    output = module(**batch)
    return output.loss, output


def without_cache(module: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = module(**batch, use_cache=False).loss
    return loss


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def seeded(make: Callable[..., nn.Module], dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return make(dropout)


def gradients(module: nn.Module, batch: Any) -> tuple[float, list[Tensor]]:
    """Return the loss of the whole batch by plain PyTorch, and the gradients."""
    loss = module.train()(**batch).loss
    loss.backward()
    return loss.item(), [parameter.grad for parameter in module.parameters()]


def train(
    module: nn.Module, loader: Any, weight: Any, *, forward: Any = forward, **options: Any
) -> list[Tensor]:
    with phalanx.Trainer(
        module,
        optimizer=adam,
        forward=forward,
        weight=weight,
        **{"microbatches": 3, "replicas": 2, **options},
    ) as trainer:
        trainer.fit(loader, epochs=2)
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@every_case
@pytest.mark.parametrize("microbatches", [None, 3])
def test_a_padded_batch_has_the_loss_and_gradients_of_the_whole(
    case: Case, microbatches: int | None
) -> None:
    make, kind, weight = case
    (batch,) = make_loader(kind, len(LINES))
    loss, expected = gradients(seeded(make, 0.0), batch)
    module = seeded(make, 0.0)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with phalanx.Trainer(
        module,
        optimizer=sgd,
        forward=forward,
        weight=weight,
        replicas=2,
        microbatches=microbatches,
    ) as trainer:
        (epoch,) = trainer.fit([batch])
    assert epoch.train["loss"] == pytest.approx(loss, abs=1e-6)
    for was, parameter, gradient in zip(before, module.parameters(), expected, strict=True):
        assert torch.allclose(was - parameter.detach(), gradient, atol=1e-6, rtol=0)


def test_rows_in_the_place_of_tokens_would_give_another_loss() -> None:
    (batch,) = make_loader("causal", len(LINES))
    loss, _ = gradients(seeded(gpt2, 0.0), batch)
    with phalanx.Trainer(
        seeded(gpt2, 0.0), optimizer=sgd, forward=forward, replicas=2, microbatches=3
    ) as trainer:
        (epoch,) = trainer.fit([batch])
    assert abs(epoch.train["loss"] - loss) > 1e-4


@every_case
def test_the_bits_are_the_same_for_one_replica_and_two(case: Case) -> None:
    make, kind, weight = case
    one, two = (
        train(seeded(make), make_loader(kind), weight, replicas=replicas) for replicas in (1, 2)
    )
    assert same(one, two)


@pytest.mark.parametrize(
    ("make", "kind", "weight"),
    [(gpt2, "causal", num_predicted), (masked, "masked", num_masked)],
    ids=["gpt2", "masked"],
)
def test_checkpointing_draws_the_same_numbers_again(make: Any, kind: str, weight: Any) -> None:
    forward = without_cache if make is gpt2 else lambda module, batch: module(**batch).loss
    found = []
    for is_checkpointed in (False, True):
        module: Any = seeded(make)
        if is_checkpointed:
            module.activation_checkpointing_enable(PRESERVING)
        found.append(train(module, make_loader(kind), weight, forward=forward))
    assert same(*found)


def test_checkpointing_that_would_draw_others_is_refused_with_the_way_out() -> None:
    module: Any = seeded(llama)
    module.activation_checkpointing_enable()
    match = r"activation_checkpointing_enable\({.*preserve_rng}"
    with pytest.raises(UnsupportedError, match=match):
        train(module, make_loader("causal"), num_predicted, forward=without_cache)


def test_tied_weights_stay_tied_and_travel(tmp_path: Path) -> None:
    module: Any = seeded(gpt2)
    with phalanx.Trainer(
        module, optimizer=adam, forward=forward, weight=num_predicted, replicas=2, microbatches=3
    ) as trainer:
        trainer.fit(make_loader("causal"))
        assert module.lm_head.weight is module.transformer.wte.weight
        trainer.save(tmp_path / "checkpoint")
        module.save_pretrained(tmp_path / "model")
        trainer.fit(make_loader("causal"), epochs=2)
    again: Any = seeded(gpt2)
    with phalanx.Trainer(
        again, optimizer=adam, forward=forward, weight=num_predicted, replicas=1, microbatches=3
    ) as trainer:
        trainer.resume(tmp_path / "checkpoint")
        loaded = type(module).from_pretrained(tmp_path / "model")
        assert same(list(loaded.parameters()), list(again.parameters()))
        trainer.fit(make_loader("causal"), epochs=2)
    assert same(list(module.parameters()), list(again.parameters()))
    assert again.lm_head.weight is again.transformer.wte.weight


@every_case
def test_outputs_of_replicas_are_merged_in_their_own_class(case: Case) -> None:
    make, kind, _ = case
    module = seeded(make).eval()
    (batch,) = make_loader(kind, len(LINES))
    expected: Any = module(**batch)
    with phalanx.DataParallel(module, 2, output={"loss": "mean"}) as parallel:
        found = parallel(**batch)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    assert found.loss.dim() == 0
