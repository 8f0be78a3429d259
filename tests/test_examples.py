"""The examples run: the tour prints its twelve stops, the rehearsal loss works in another loop."""

import re
from pathlib import Path

import pytest
import torch

from dph.answering import Policy
from dph.config import load_config
from dph.model_folder import load_model
from dph.prompts import tokenize
from dph.tokenizer import load_tokenizer
from examples.own_loop import rehearse
from examples.tour import OWN, tour
from tests.helpers import WordTask, tiny_folder

ROOT = Path(__file__).parent.parent


def test_the_tour_has_twelve_stops_like_its_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_folder(tmp_path / "model")
    config = load_config(ROOT / "configs" / "miniature_dph_js.toml", ["--sampling.max_new_tokens=6"])
    policy = Policy(load_model(path), load_tokenizer(path), path)
    tour(policy, tokenize(WordTask(), policy.tokenizer, config), config)
    text = capsys.readouterr().out
    headings = re.findall(r"^## .*$", text, re.M)
    assert [h.split()[1] for h in headings] == [f"{n}." for n in range(1, 13)]
    assert headings == re.findall(r"^## .*$", (ROOT / "docs" / "tour.md").read_text(encoding="utf-8"), re.M)
    assert text.endswith(OWN + "\n")
    assert (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").endswith(OWN + "\n")
    before, after = map(float, re.findall(r"L_pef before (\S+), after (\S+)", text)[0])
    assert after < before


def test_rehearsal_in_another_loop_brings_the_model_back() -> None:
    torch.manual_seed(0)
    tokens, lengths = torch.randint(9, (4, 5)), torch.tensor([5, 3, 1, 5])
    start = torch.randn(4, 5, 9)
    ref = start.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    logits = (start + torch.randn(4, 5, 9)).requires_grad_()
    optimizer = torch.optim.AdamW([logits], lr=0.1, weight_decay=0)
    first = rehearse(logits, tokens, ref, lengths).item()
    for _ in range(50):
        loss = rehearse(logits, tokens, ref, lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05 * first
    assert rehearse(start, tokens, ref, lengths).item() == 0
