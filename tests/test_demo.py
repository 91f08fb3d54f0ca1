"""The demo: a trained model, an engine that reuses prefixes, and a command that notices when something is off."""

from __future__ import annotations

import json
import re
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from kdaserve.cli.demo import demo
from kdaserve.demo import measure, serve
from kdaserve.demo.corpus import load_corpus
from kdaserve.demo.model import START, ByteLM, bits_per_byte, load_model
from kdaserve.demo.prompts import PREFIX, PROMPTS
from kdaserve.demo.serve import Engine, common_prefix
from kdaserve.nn import KimiDeltaAttention
from kdaserve.testing import assert_close, assert_same_bits

DEMO = resources.files("kdaserve.demo")


@pytest.fixture(scope="module")
def model() -> ByteLM:
    return load_model()


def encoded(*prompts: str) -> list[bytes]:
    return [START + prompt.encode() for prompt in prompts]


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(demo)
    return CliRunner().invoke(app, arguments)


CARD = DEMO.joinpath("MODEL_CARD.md").read_text()


def on_card(pattern: str) -> str:
    found = re.search(pattern, CARD)
    assert found, pattern
    return found[1]


def test_weights_are_small_and_the_card_counts_them(model: ByteLM) -> None:
    assert len(DEMO.joinpath("model.safetensors").read_bytes()) <= 8e6
    assert sum(p.numel() for p in model.parameters()) == int(on_card(r"parameters \| ([\d,]+)").replace(",", ""))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_held_out_text_costs_what_the_card_says(model: ByteLM) -> None:
    corpus = load_corpus()
    bits, said = bits_per_byte(model, corpus.held_out[::4]), float(on_card(r"held-out bits per byte \| \*\*([\d.]+)"))
    assert said <= 2.5
    if corpus.digest == on_card(r"SHA-256 \| `(\w+)`"):
        assert abs(bits - said) < 0.25
    else:  # another Python, other topics: partly what this model was trained on, partly new
        assert bits <= 3.0


def test_no_paragraph_stands_on_both_sides_of_the_split() -> None:
    paragraphs = [{" ".join(p.split()) for piece in part for p in piece.decode().split("\n\n")} for part in load_corpus()]
    for i, a in enumerate(paragraphs):
        for b in paragraphs[i + 1 :]:
            assert not (a & b) - {""}


def test_the_default_prefix_is_long_enough_and_not_held_out() -> None:
    assert len(PREFIX.encode()) >= 192
    assert all(prompt.startswith(PREFIX) for prompt in PROMPTS)
    held_out = b"\n".join(load_corpus().held_out)
    for line in PREFIX.encode().splitlines():
        assert len(line) < 40 or line not in held_out


@pytest.mark.parametrize(
    "prompts",
    [
        [PREFIX[:200] + "a", PREFIX[:200] + "bc", PREFIX[:70]],
        [PREFIX[:127], PREFIX[:127], PREFIX[:128]],
        [PREFIX[:64]] * 6,
    ],
    ids=["longer", "all but one shared", "more than four"],
)
def test_serving_from_a_saved_prefix_gives_the_bits_of_one_run(model: ByteLM, prompts: list[str]) -> None:
    texts = encoded(*prompts)
    reusing, plain = Engine(model, 8), Engine(model, 8)
    prefix = reusing.save_prefix(texts)
    assert prefix is not None
    assert len(prefix.text) % 64 == 0
    a, b = reusing.generate(texts, 12, prefix), plain.generate(texts, 12)
    assert a.texts == b.texts
    assert a.prefill_tokens < b.prefill_tokens
    for layer in range(len(model.blocks)):
        for kind in ("recurrent", "conv"):
            states_a, states_b = getattr(reusing.pool, kind)(layer), getattr(plain.pool, kind)(layer)
            assert_same_bits(states_a[a.slots], states_b[b.slots], f"{kind} states of layer {layer}")
    assert measure.touched(reusing, a, prefix) == []
    assert measure.largest_deviation(reusing, texts, a, prefix) <= measure.TOLERANCE


def test_prompts_that_do_not_begin_with_the_prefix_start_afresh(model: ByteLM) -> None:
    engine, texts = Engine(model, 8), encoded(PREFIX[:100], "x" * 100)
    prefix = engine.save_prefix(encoded(PREFIX[:90]))
    assert prefix is not None
    assert engine.generate(texts, 5, prefix).texts == Engine(model, 8).generate(texts, 5).texts


def test_decode_is_what_one_prefill_would_say(model: ByteLM) -> None:
    texts = encoded(PREFIX + "If ", "class ", "")
    served = Engine(model, 3).generate(texts, 10)
    for prompt, text in zip(texts, served.texts, strict=True):
        assert text
        for i in range(len(text)):
            assert Engine(model, 1).prefill([prompt + text[:i]], [0]) == [text[i]]


def test_a_batch_ends_when_all_are_done_and_slots_come_back(model: ByteLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "STOP", b"e")
    engine = Engine(model, 3)
    served = engine.generate(encoded("The ", "A ", "In "), 30)
    assert all(text.endswith(b"e") or len(text) == 30 for text in served.texts)
    assert served.decode_tokens == sum(len(text) - 1 for text in served.texts)
    engine.release(served)
    assert engine.pool.free_slots == 3


def test_common_prefix() -> None:
    assert common_prefix([b"abc", b"abd", b"ab"]) == b"ab"
    assert common_prefix([b"abc"]) == b"abc"
    assert common_prefix([b"a", b"b"]) == b""


def test_training_and_serving_are_the_same_function(model: ByteLM) -> None:
    tokens = torch.tensor(list(encoded(PREFIX[:99])[0]))
    hidden = model.prefill(tokens[None], model.state_pool(1), torch.tensor([0]), serve.plan_prefill(lengths=[100]))
    assert_close(model(tokens[None]), model.logits(hidden), 1e-5, "logits")


HOSTILE = {
    "empty": [""],
    "short": ["abc", "abd"],
    "nothing shared": ["x" * 70, "y" * 130, "日本語 ñ"],
    "equal": ["def f(x):" * 10] * 2,
    "not encodable": ["\udcff\ud800"],
}


@pytest.mark.parametrize("prompts", HOSTILE.values(), ids=HOSTILE.keys())
def test_any_prompt_is_served(prompts: list[str]) -> None:
    result = run("--json", "--tokens", "3", *(word for prompt in prompts for word in ("--prompt", prompt)))
    report = json.loads(result.stdout)
    assert result.exit_code == 0, report
    assert report["ok"]
    assert len(report["texts"]) == len(report["prompts"]) == len(prompts)


def test_json_is_one_object_with_all_figures() -> None:
    result = run("--json", "--tokens", "6")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["problems"] == []
    assert report["prompts"] == [*PROMPTS]
    assert report["prefix_tokens"] == len(encoded(PREFIX)[0]) // 64 * 64
    assert report["largest_deviation"] <= measure.TOLERANCE
    for figure in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        assert report[figure] > 0
    assert all(seconds > 0 for seconds in report["first_token_seconds"].values())


def test_text_output_shows_the_check_and_no_colours_off_a_terminal() -> None:
    result = run("--tokens", "2", "--prompt", "[bold] is no markup")
    assert result.exit_code == 0
    assert "check passed" in result.stdout
    assert "[bold] is no markup" in result.stdout
    assert "\x1b" not in result.stdout


def test_reuse_is_shown_only_where_something_is_shared() -> None:
    one = run("--tokens", "2", "--prompt", "abc")
    two = run("--tokens", "2", "--prompt", PREFIX[:99] + "a", "--prompt", PREFIX[:99] + "b")
    assert one.exit_code == two.exit_code == 0
    assert "reuse" not in one.stdout
    assert "1 prompt, nothing shared" in one.stdout
    assert "2 prompts, 64 tokens of them shared and saved" in two.stdout
    assert two.stdout.count("with prefix reuse") == 2


def test_prompt_and_text_stand_apart() -> None:
    lines = run("--tokens", "2", "--prompt", "one\ntwo").stdout.splitlines()
    i = lines.index("prompt | one")
    assert lines[i + 1] == "       | two"
    assert lines[i + 2].startswith(" model | ")


def lose_the_convolution_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KimiDeltaAttention, "_store_conv", lambda *_: None)


def write_a_spare_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Engine.save_prefix

    def sabotaged(engine: Engine, texts: list[bytes]) -> serve.Prefix | None:
        engine.pool.recurrent(2)[-1, 0, 0, 0] = 1
        return save(engine, texts)

    monkeypatch.setattr(Engine, "save_prefix", sabotaged)


def poison_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Engine.save_prefix

    def sabotaged(engine: Engine, texts: list[bytes]) -> serve.Prefix | None:
        prefix = save(engine, texts)
        assert prefix is not None
        engine.pool.recurrent(0)[prefix.slot, 0, 0, 0] = torch.nan
        return prefix

    monkeypatch.setattr(Engine, "save_prefix", sabotaged)


def fill_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SPARE_SLOTS", -2)


@pytest.mark.parametrize(
    ("sabotage", "says"),
    [
        (lose_the_convolution_state, "conv state with prefix reuse has other bits"),
        (write_a_spare_slot, "written, but given to no request"),
        (poison_the_prefix, "deviates by nan"),
        (fill_the_pool, "KDA127"),
    ],
)
def test_the_check_notices(monkeypatch: pytest.MonkeyPatch, sabotage, says: str) -> None:
    sabotage(monkeypatch)
    prompts = "--tokens", "3", "--prompt", PREFIX[:80] + "a", "--prompt", PREFIX[:80] + "b"
    plain = run(*prompts)
    assert plain.exit_code == 1
    assert "check failed" in plain.stdout
    as_json = run("--json", *prompts)
    report = json.loads(as_json.stdout)
    assert as_json.exit_code == 1
    assert not report["ok"]
    assert any(says in problem for problem in report["problems"])
    assert report["problems"][0] in plain.stdout


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import train_demo

    corpus = load_corpus()
    small = corpus._replace(train=corpus.train[:3], validation=(b"abc " * 20,), held_out=(b"def " * 20,))
    monkeypatch.setattr(train_demo, "load_corpus", lambda: small)
    monkeypatch.setattr(train_demo, "ByteLM", lambda dropout: ByteLM(1, 32, 2, 32, dropout))
    options = "--out", str(tmp_path), "--device", "cpu", "--steps", "20", "--batch", "4", "--length", "64", "--evaluate-every", "10"
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *options])
    train_demo.main()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["history"][-1]["train"] < figures["history"][0]["train"] < 9
    assert (tmp_path / "model.safetensors").stat().st_size > 1000
    assert "held-out" in capsys.readouterr().out
