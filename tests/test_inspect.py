"""The page of a run's answers: what it shows is what the models say, and no text of a run is ever markup."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from safetensors.torch import load_file

import train
from dph.cli import run_command
from dph.config import load_config
from dph.divergences import make_divergence
from dph.errors import UserError
from dph.inspect import Shown, card, inspect, limit, main, pieces, row
from dph.losses import group_advantages
from dph.model_folder import load_model
from dph.prompts import tokenize
from dph.rollouts import Rollout, unpack
from dph.tasks import load_task
from dph.tokenizer import load_tokenizer
from tests.helpers import SMALL_RUN, rollout, tiny_folder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TASK = """
from dph.tasks import Prompt, Reward, Task

class Early(Task):
    def __init__(self, options, data, seed):
        words = "a box coin has how loses many what".split()
        messages = [({"role": "user", "content": f"{word} <b>"},) for word in words]
        super().__init__("early", [Prompt(i, message, "a & b", {}) for i, message in enumerate(messages)])

    def rewards(self, pairs):
        return [Reward.of("right" if text and text[0] < "h" else "wrong", text) for _, text in pairs]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of DPH-JS whose last step's rollouts are recorded."""
    home = tmp_path_factory.mktemp("inspect")
    model = tiny_folder(home / "model")
    (home / "early.py").write_text(TASK)
    config = home / "run.toml"
    config.write_text(
        f'[run]\nname = "a<b"\nfolder = "{home}"\n[model]\npath = "{model}"\n[data]\ntrain = "task:{home}/early.py"\n'
        f'eval = ["task:{home}/early.py"]\n[sampling]\nmax_new_tokens = 5\n{SMALL_RUN}record_rollouts = true\n'
        "eval_every = 2\n[eval]\nfinal = false\nsamples = 2\nk = [1]\nduring_samples = 1\n"
        '[loss]\ndivergence = "js"\neta = 0.1\n[optim]\nlr = 0.002\n'
    )  # fmt: skip
    before = sys.argv
    sys.argv = ["train.py", str(config)]
    try:
        run_command(train.main, "", train._arguments)
    finally:
        sys.argv = before
    return home / "a<b"


class Page(HTMLParser):
    """The page as a browser reads it: sections of answers of tokens, each with its attributes and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags = path.read_text(encoding="utf-8"), set[str]()
        self.sections: list[dict] = []
        self.token: dict | None = None
        self.feed(self.text)
        self.answers = [answer for section in self.sections for answer in section["answers"]]

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        found, self.token = dict(attrs), None
        self.tags.add(tag)
        if tag == "section":
            self.sections.append({**found, "answers": []})
        elif "answer" in (found.get("class") or "").split():
            self.sections[-1]["answers"].append({**found, "tokens": []})
        elif found.get("class") == "t":
            self.token = {**found, "text": ""}
            self.sections[-1]["answers"][-1]["tokens"].append(self.token)

    def handle_data(self, data: str) -> None:
        if self.token is not None:
            self.token["text"] += data

    def handle_endtag(self, tag: str) -> None:
        self.token = None


def logprobs(folder: Path, given: Rollout) -> torch.Tensor:
    """Log-probabilities of an answer's tokens by one plain forward pass."""
    model = load_model(folder)
    ids = torch.tensor(given.prompt_tokens + given.tokens)
    with torch.no_grad():
        scores = model.logits(model(ids[None]))[0].log_softmax(-1)
    start = len(given.prompt_tokens)
    return scores[start - 1 : -1].gather(1, ids[start:, None])[:, 0]


def recorded(run: Path) -> list[Rollout]:
    """The last step's rollouts."""
    flat = load_file(run / "rollouts" / "step-2.safetensors")
    return unpack({key.removeprefix("rollouts."): x for key, x in flat.items() if key.startswith("rollouts.")})


def once(rollouts: Sequence[Rollout], values: Sequence) -> list:
    """The values of different answers, in order."""
    return list({(given.prompt, *given.tokens): x for given, x in zip(rollouts, values, strict=True)}.values())


def test_tokens_carry_log_u_and_its_pull(run: Path) -> None:
    answers = [answer for answer in Page(inspect(run)).answers if answer["data-advantage"]]
    js = make_divergence("js")
    for answer, given in zip(answers, once(recorded(run), recorded(run)), strict=True):
        log_u = logprobs(run / "checkpoints" / "step-2", given) - logprobs(run.parent / "model", given)
        assert [float(t["data-u"]) for t in answer["tokens"]] == pytest.approx(log_u.tolist(), rel=1e-3, abs=1e-4)
        pull = log_u.exp() * js.derivative(log_u)
        assert [float(t["data-pull"]) for t in answer["tokens"]] == pytest.approx(pull.tolist(), rel=1e-3, abs=1e-4)
    assert any(abs(float(t["data-u"])) > 0.01 for answer in answers for t in answer["tokens"])


def test_answers_carry_their_verdict_and_advantage(run: Path) -> None:
    answers = [answer for answer in Page(inspect(run)).answers if answer["data-advantage"]]
    given, tokenizer = recorded(run), load_tokenizer(run.parent / "model")
    right = [tokenizer.decode(r.tokens)[:1] < "h" and tokenizer.decode(r.tokens) != "" for r in given]
    assert [answer["class"] for answer in answers] == [
        "answer right" if ok else "answer wrong" for ok in once(given, right)
    ]
    rewards = torch.tensor([r.reward for r in given])
    advantages = group_advantages(rewards, torch.arange(len(given)) // 2)
    assert [float(answer["data-advantage"]) for answer in answers] == pytest.approx(
        once(given, advantages.tolist()), abs=1e-3
    )


def test_stored_answers_stand_beside_and_have_no_advantage(run: Path) -> None:
    sections = [section for section in Page(inspect(run)).sections if section["data-kind"] == "rehearsal"]
    stored = unpack(load_file(run / "presample" / "rehearsal.safetensors"))
    answers = [answer for section in sections for answer in section["answers"]]
    assert sum(int(answer["data-count"]) for answer in answers) == len(stored) > 0
    assert all(answer["data-advantage"] == "" and answer["class"] == "answer right" for answer in answers)


def test_without_recorded_rollouts_answers_are_written_anew(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / run.name, ignore=shutil.ignore_patterns("rollouts"))
    explored = [each for each in Page(inspect(moved, prompts=3)).sections if each["data-kind"] == "explored"]
    counts = [sum(int(answer["data-count"]) for answer in section["answers"]) for section in explored]
    assert counts == [2, 2, 2]
    assert "written for this page" in Page(moved / "inspect.html").text


def test_another_divergence_may_be_asked_for(run: Path) -> None:
    text = Page(inspect(run, divergence="forward_kl")).text
    assert "of forward_kl" in text
    tokens = [token for answer in Page(run / "inspect.html").answers for token in answer["tokens"]]
    for token in tokens:  # u f'(u) = u - 1
        u = torch.tensor(float(token["data-u"])).exp().item()
        assert float(token["data-pull"]) == pytest.approx(u - 1, rel=1e-2, abs=1e-3)


def test_the_page_needs_nothing_else_and_no_text_is_markup(run: Path) -> None:
    page = Page(inspect(run))
    assert not re.search(r"https?:|src=|href=|@import|url\(", page.text)
    assert "b" not in page.tags
    assert '<p class="prompt">' in page.text
    assert " &lt;b&gt;</p>" in page.text
    assert "a &amp; b" in page.text
    assert "<title>a&lt;b" in page.text
    assert "{{" not in page.text


def test_the_same_answer_stands_there_once_with_its_count(run: Path) -> None:
    config = load_config(run / "config.toml")
    tokenizer = load_tokenizer(run.parent / "model")
    data = tokenize(load_task(config.data.train, config.data, 0, run), tokenizer, config)
    answers = [
        Shown("explored", rollout([1], tokens), True, 0.0, [0.0, -1.0], [0.0, 0.0], [0.0, 0.0])
        for tokens in ([7, 2], [8, 2], [7, 2])
    ]
    shown = card("explored", 0, answers, data, tokenizer)
    assert re.findall(r'data-count="(\d+)"', shown) == ["2", "1"]
    assert "3 of 3 right, 2 distinct" in shown


class Bytes:
    """A tokenizer of bytes whose end token is 0."""

    end_ids = (0,)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode("utf-8", errors="replace")


def test_token_texts_make_the_answer_up() -> None:
    text = "né <b>&🙂"
    found = pieces(Bytes(), [*text.encode(), 0])  # type: ignore[arg-type]
    assert "".join(x for x in found if not x.startswith("⟨")) == text
    assert len(found) == len(text.encode()) + 1
    assert found[-1] == "⟨end⟩"
    assert found[1:3] == ["⟨195⟩", "é"]


def test_an_answer_that_is_no_text_keeps_its_marks() -> None:
    assert pieces(Bytes(), [0xC3, 0x28]) == ["⟨195⟩", "\ufffd("]  # type: ignore[arg-type]
    assert pieces(Bytes(), [0x41, 0xC3]) == ["A", "\ufffd"]  # type: ignore[arg-type]


def test_what_an_answer_says_is_escaped() -> None:
    tokens = list(b"</script>&")
    zeros = [0.0] * len(tokens)
    shown = row(Shown("explored", rollout([1], tokens), False, 0.0, zeros, zeros, zeros), 1, Bytes())  # type: ignore[arg-type]
    assert "&lt;" in shown
    assert "&amp;</span>" in shown
    assert "/script" not in shown


def test_the_colour_scale_leaves_few_values_outside() -> None:
    assert limit([*[0.1, -0.2] * 100, 1e9]) == pytest.approx(0.2)
    assert limit([]) > 0
    assert limit([0.0, float("nan")]) > 0


@pytest.mark.parametrize(
    ("change", "message"), [("config.toml", "no run's folder"), ("checkpoints", "no checkpoint yet")]
)
def test_a_folder_that_is_no_trained_run_is_named(change: str, message: str, run: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(run, tmp_path / run.name, ignore=shutil.ignore_patterns(change))
    with pytest.raises(UserError, match=message) as error:
        inspect(broken)
    assert str(broken) in str(error.value)


def test_a_mistake_on_the_command_line_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["nowhere"], "no run's folder"),
        ([run, "--divergence=kl"], "'kl' should be"),
        ([run, "--prompts=0"], "--prompts 0 should be at least 1"),
        ([run, "--prompts=x"], "invalid int value: 'x'"),
        ([], "RUN"),
    ):
        monkeypatch.setattr(sys, "argv", ["inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        error = capsys.readouterr().err
        assert stopped.value.code == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error


# ---- in a browser ------------------------------------------------------------------------------------------------


def draw(page: Path, *flags: str) -> str:
    """What chromium prints of a page."""
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --hide-scrollbars --window-size=1200,900"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [str(CHROMIUM), *quiet.split(), profile, *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_is_drawn_shaded_and_filtered(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = inspect(run).read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    picture = tmp_path / "page.png"
    draw(page, f"--screenshot={picture}")
    pixels = plt.imread(picture)[..., :3]
    coloured = (pixels.max(-1) - pixels.min(-1)) > 0.3
    assert pixels.shape[:2] == (900, 1200)
    assert coloured.mean() > 1e-3
    chosen = text.replace('value="all" checked>all', 'value="all">all').replace(
        'value="wrong">', 'value="wrong" checked>'
    )
    page.write_text(chosen, encoding="utf-8")
    answers = re.findall(r'<div class="answer (right|wrong)"([^>]*)>', draw(page, "--dump-dom"))
    assert {"right", "wrong"} == {verdict for verdict, _ in answers}
    assert all(("hidden" in rest) == (verdict == "right") for verdict, rest in answers)
