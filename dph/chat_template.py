"""A checkpoint's chat template: from messages to the one text that a model reads.

Templates are programs in Jinja's language that come with a checkpoint. They run in Jinja's sandbox, with the settings
and functions that transformers gives them. What a template may ask the clock for is fixed: `strftime_now` answers with
the day that it is given (at midnight), because prompts that change overnight would make a continued run another run.

Simplified: no tools or documents; of several templates only the one named "default".
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dph.errors import UserError

OWN = ("messages", "add_generation_prompt", "raise_exception", "strftime_now")  # not a user's to set


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's words for others' loss masks; here just text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own spelling)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template's text; a list of {name, template} where a checkpoint has several.
        path: the file that it comes from, for errors.
        tokens: bos_token, eos_token and so on, as texts.
        variables: what the user sets, [data] template: date_string, enable_thinking, ...
        today: the day that `strftime_now` tells.

    Raises: UserError for a template that is empty, broken or no text, and for a variable that it does not read.
    """

    def __init__(
        self, source: Any, path: Path, tokens: Mapping[str, str], variables: Mapping[str, Any], today: date
    ) -> None:
        self.source = _default(source, path)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # unlike jinja's own it escapes no HTML
        environment.globals |= {"add_generation_prompt": True, "tools": None, "documents": None, **tokens}
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": datetime.combine(today, time()).strftime,
        }
        try:
            reads = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
            self.template = environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"{path}: broken chat template: {error!r}") from None
        free = sorted(reads - {*OWN, *tokens})
        for name in variables:
            if name not in free:
                raise UserError(
                    f"data.template sets {name!r}, but the chat template in {path} reads {', '.join(free) or 'nothing'}"
                )
        self.variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation ({role, content}, ...), up to where the assistant's answer begins.

        Raises: whatever a stranger's template raises.
        """
        return self.template.render(messages=list(messages), **self.variables)


def read_chat_template(
    folder: Path, named: Any, tokens: Mapping[str, str], variables: Mapping[str, Any], today: date
) -> ChatTemplate | None:
    """The template of a model folder: chat_template.jinja, else what tokenizer_config.json names; None without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: is not UTF-8 at byte {error.start + 1}") from None
        return ChatTemplate(source, file, tokens, variables, today)
    if named is not None:
        return ChatTemplate(named, folder / "tokenizer_config.json", tokens, variables, today)
    if variables:
        raise UserError(f"data.template sets {', '.join(map(repr, variables))}, but {folder} has no chat template")
    return None


def _default(source: Any, path: Path) -> str:
    """The one text among what a checkpoint may spell its template as."""
    if isinstance(source, list):
        templates = [each for each in source if isinstance(each, dict) and each.get("name") == "default"]
        if not templates:
            raise UserError(f"{path}: broken chat template: of {len(source)} none is named 'default'")
        source = templates[-1].get("template")
    if not isinstance(source, str):
        raise UserError(f"{path}: broken chat template: it is {str(source)[:80]!r}; it should be a text")
    if not source.strip():
        raise UserError(f"{path}: the chat template is empty; without the file or key, messages are joined as they are")
    return source


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
