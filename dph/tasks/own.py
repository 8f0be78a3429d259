"""A task of your own: `task:path/to/file.py?option=value` names a Python file that defines one subclass of `Task`.

The file runs when the source is opened, and its class is called with (options, data, seed). A source is the only way
to name code: no model folder and no data file can. What the class makes and returns is checked here, so that a mistake
in it is one line that names the file, never a reward that is silently wrong. How to write one: docs/own_task.md.
"""

import hashlib
import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from dph.errors import DataError, UserError
from dph.tasks.base import Outcome, Prompt, Reward, Row, Task

if TYPE_CHECKING:
    from dph.config import DataConfig


class OwnTask(Task):
    """The task of a file, which it checks at every turn.

    Args:
        where: the file, from the folder in which the command runs.
        options: the source's, for the file's class.
        data, seed: the config's [data] section and the run's seed, for the file's class.
        folder: not used.
        stored: as in load_task; `answer` is the gold answer.

    Raises:
        DataError: the file is missing, fails, defines no task or several, or makes prompts that cannot be used.
    """

    def __init__(
        self,
        where: str,
        options: dict[str, str],
        data: "DataConfig",
        seed: int,
        folder: Path,
        stored: Sequence[Row] | None = None,
    ) -> None:
        self.path = Path(where).expanduser()
        kind = find_task(import_file(self.path), self.path)
        with mistakes_in(self.path):
            self.inner: Task = kind(options, data, seed)  # type: ignore[arg-type, call-arg]  # the file's own signature
            prompts = list(self.inner.prompts())
        if stored is not None:
            prompts = [Prompt(index, (), stored_answer(row), {}) for index, row in enumerate(stored)]
        else:
            check_prompts(self.path, prompts)
            # Their own numbers equal these, but may be NumPy's, which no file of a run can hold.
            prompts = [replace(prompt, index=number) for number, prompt in enumerate(prompts)]
            for prompt in prompts:
                check_record(self.path, prompt, self.inner)
        super().__init__(f"task:{where}", prompts)
        self.grader = hashlib.sha256(self.path.read_bytes()).hexdigest()  # as it was when it was run

    def check(self) -> None:
        """What the file's class checks of its gold answers."""
        with mistakes_in(self.path):
            self.inner.check()

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """The columns of a stored answer beside its response."""
        with mistakes_in(self.path):
            return self.inner.record(prompt)

    def content(self) -> dict[str, str]:
        """The file, and what else its class says that its rewards depend on."""
        with mistakes_in(self.path):
            found = self.inner.content()
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            shown = repr(found)[:80]
            raise DataError(self.path, None, f"content() should return a dict of names and hashes; it returned {shown}")
        return {**found, "grader": self.grader}

    def nondeterministic(self) -> list[Prompt]:
        """The prompts whose gold answer the file's class calls open."""
        with mistakes_in(self.path):
            return self.inner.nondeterministic()

    def rewards(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """The file's rewards of a batch, each of them checked."""
        with mistakes_in(self.path):
            rewards = self.inner.rewards(pairs)
        check_rewards(self.path, rewards, len(pairs))
        return self.counted(rewards)

    def vote(self, prompt: Prompt, text: str, reward: Reward) -> str | None:
        """What the file's class says that an answer votes for."""
        with mistakes_in(self.path):
            return self.inner.vote(prompt, text, reward)

    def close(self) -> None:
        """Ends what the file's class holds."""
        self.inner.close()


def import_file(path: Path) -> ModuleType:
    """Runs a Python file and returns its module; DataError: there is none, or it fails."""
    if path.suffix != ".py":
        raise DataError(path, None, "should be a Python file, NAME.py, with a subclass of dph.tasks.Task")
    if not path.is_file():
        raise DataError(path, None, "no such file")
    name = str(path.resolve())  # no other module has this name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a spec"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with mistakes_in(path):
        spec.loader.exec_module(module)
    return module


def find_task(module: ModuleType, path: Path) -> type[Task]:
    """The one subclass of Task that the module defines itself; those that it imports do not count."""
    defined = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    found = {kind.__name__: kind for kind in defined if issubclass(kind, Task)}
    if len(found) != 1:
        count = f"{len(found)} subclasses of dph.tasks.Task ({', '.join(found)})" if found else "no subclass"
        raise DataError(path, None, f"defines {count}; it should define exactly one subclass of dph.tasks.Task")
    return next(iter(found.values()))


@contextmanager
def mistakes_in(path: Path) -> Iterator[None]:
    """Turns whatever the file's code raises into a DataError with the line; --debug shows the whole traceback."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        said = str(error)
        if isinstance(error, SyntaxError):
            places.append((error.filename or "", error.lineno))
            said = error.msg
        lines = [line for name, line in places if Path(name).resolve() == path.resolve()]
        raise DataError(path, lines[-1] if lines else None, f"{type(error).__name__}: {said}") from error


def stored_answer(row: Row) -> Any:
    """The gold answer of a stored row."""
    if row.values.get("answer") is None:
        raise row.error("has no answer, the gold answer that Task.record stores")
    return row.values["answer"]


def check_prompts(path: Path, prompts: Sequence[Any]) -> None:
    """Raises a DataError for prompts that nothing could be trained on."""
    if not prompts:
        raise DataError(path, None, "the task has no prompts; its class should hand them to super().__init__")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise DataError(path, None, f"prompt {number} = {prompt!r} should be a dph.tasks.Prompt")
        if prompt.index != number:
            raise DataError(path, None, f"prompt {number} has index = {prompt.index!r}; they should count from 0")
        if prompt.gold is None:
            raise DataError(path, None, f"prompt {number} has no gold answer (gold = None)")
        if not prompt.messages or not all(is_message(message) for message in prompt.messages):
            shown = repr(prompt.messages)[:80]
            raise DataError(path, None, f"prompt {number}: messages = {shown} should be {{role, content}}, one or more")


def check_record(path: Path, prompt: Prompt, task: Task) -> None:
    """Raises a DataError where an answer to the prompt could not be stored and graded again."""
    with mistakes_in(path):
        columns = task.record(prompt)
    try:
        json.dumps(columns, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = f"prompt {prompt.index}: the gold answer cannot be stored as JSON ({error}); override Task.record"
        raise DataError(path, None, message) from None


def is_message(message: Any) -> bool:
    """Whether it is one turn of a chat."""
    if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
        return False
    return isinstance(message.get("content"), str)


def check_rewards(path: Path, rewards: Any, count: int) -> None:
    """Raises a DataError unless there is one Reward an answer, its value a number from 0 to 1, and 1 if it is right."""
    if not isinstance(rewards, list) or len(rewards) != count:
        found = f"{len(rewards)}" if isinstance(rewards, list) else type(rewards).__name__
        raise DataError(path, None, f"rewards() should return a list of {count}, one an answer; it returned {found}")
    for reward in rewards:
        if not isinstance(reward, Reward):
            raise DataError(path, None, f"reward {reward!r} should be a dph.tasks.Reward, e.g. Reward.of('right')")
        value = reward.value
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or not 0 <= value <= 1:
            raise DataError(path, None, f"reward {value!r} should be a number from 0 to 1")
        if reward.outcome not in get_args(Outcome):
            known = ", ".join(get_args(Outcome))
            raise DataError(path, None, f"outcome {reward.outcome!r} of a reward should be one of {known}")
        if (reward.outcome == "right") != (value == 1):
            raise DataError(path, None, f"reward {value!r} with outcome {reward.outcome!r}: right is 1, the rest less")
