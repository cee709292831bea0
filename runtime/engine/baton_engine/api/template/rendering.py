"""
Rendering of one conversation, in this process or in one of its own: variables in, a prompt out.

To continue the last message, a marker is appended to it, and the prompt is cut at the marker. The prompt then
ends within the message, independent of the text that the template adds after messages.

`chat_template_kwargs` are passed on, except names with a meaning of their own. `reasoning_effort` becomes the
variables that templates know: the effort, and whether to reason at all (`enable_thinking` or `thinking`).

The sandbox limits the steps of a template, but a single call of Python's library can need unlimited time and
memory, and only a process can be stopped during such a call. So each template of a request runs in a process
of its own, with limits of memory and processor time, a deadline, and only its pipes open. Its start takes a
tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.api.fields import Fields, shown
from baton_engine.api.template import dialect, sandbox
from baton_engine.api.template.sandbox import MOST_CHARACTERS, TemplateError

MARK = "THE_MESSAGE_CONTINUES_HERE "
"""The trailing space shows whether the template strips messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    messages: Sequence[Mapping[str, Any]]
    """Messages in the format of `baton_engine.api.chat.messages`."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    prompted: bool = True
    """Whether the prompt ends with the start of the assistant's next message."""
    continued: bool = False
    """Whether the prompt ends within the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""


def render(source: str, conversation: TemplateInput, specials: Mapping[str, str]) -> str:
    """Render a conversation with the template `source`. Raises TemplateError."""
    program = sandbox.read(source)
    message_format = dialect.learn(program, tuple(sorted(specials.items())))
    messages = message_format.adapt(conversation.messages)
    if conversation.continued:
        _mark(messages[-1])
    prompt = program.run(
        {
            **specials,
            **conversation.variables,
            "messages": messages,
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.prompted,
        }
    )
    return _cut(prompt) if conversation.continued else prompt


def _mark(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1] = content[-1] | {"text": content[-1]["text"] + MARK}
    elif isinstance(content, str):
        message["content"] = content + MARK
    else:
        raise TemplateError("the last message cannot be continued, because it has no content")


def _cut(prompt: str) -> str:
    at = prompt.rfind(MARK.strip())
    if at < 0:
        raise TemplateError("the last message cannot be continued, because the prompt does not contain it")
    return prompt[:at] if prompt.startswith(MARK, at) else prompt[:at].rstrip()


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
SWITCHES = ("enable_thinking", "thinking")
RESERVED = frozenset({
    "messages", "conversation", "tools", "functions", "documents", "template", "chat_template", "loop",
    "self", "tokenize", "tokenizer", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum", "caller", "varargs", "kwargs",
})  # fmt: skip
"""Variables that requests cannot set, besides special tokens."""


def read_variables(
    fields: Fields, defaults: Mapping[str, Any], specials: Mapping[str, str]
) -> dict[str, Any]:
    """Merge variables: `defaults`, then those of `reasoning_effort`, then the request's own."""
    given = dict(fields.mapping("chat_template_kwargs") or {})
    given.pop("chat_template", None)  # see `read_template`
    most = limits.TEMPLATE_KWARGS.most
    if len(given) > most:
        fields.wrong_value("chat_template_kwargs", f"Expected at most {most}, but got {len(given)}")
    for name in given:
        if name in RESERVED or name in specials or not name.isidentifier() or name.startswith("_"):
            fields.wrong_value("chat_template_kwargs", f"{shown(name)} cannot be set by a request")
    effort = fields.choice("reasoning_effort", EFFORTS)
    of_effort: dict[str, Any] = {}
    if effort is not None:
        of_effort = {"reasoning_effort": "max" if effort == "ultra" else effort}
        of_effort |= dict.fromkeys(SWITCHES, effort != "none")
    return _both(defaults) | of_effort | _both(given)


def read_template(fields: Fields, trusted: bool) -> str | None:
    """Read the request's own template, a field or a variable. Raises InvalidRequest if it is not allowed."""
    for members in (fields, fields.member("chat_template_kwargs")):
        source = members.text("chat_template")
        if source is None:
            continue
        if not trusted:
            raise InvalidRequest(
                f"'{members.param('chat_template')}' is not allowed: templates of requests are disabled. "
                "Start the worker with --trust-request-chat-template if its clients are trusted.",
                param=members.param("chat_template"),
                code=UNSUPPORTED_PARAMETER,
            )
        return source
    return None


def _both(given: Mapping[str, Any]) -> dict[str, Any]:
    """Set both names of the reasoning switch if one of them is set."""
    switches = [name for name in SWITCHES if given.get(name) is not None]
    if len(switches) != 1:
        return dict(given)
    return dict(given) | dict.fromkeys(SWITCHES, given[switches[0]])


MOST_MEMORY = 512 * 1024 * 1024
"""Maximum bytes of address space, including the interpreter."""
MOST_PROCESSOR_S = 5
DEADLINE_S = 10.0
"""Maximum seconds of a rendering. Longer than the processor time, for busy machines."""
MOST_AT_ONCE = 2
"""Maximum number of processes. Further renderings wait."""

_slots = threading.BoundedSemaphore(MOST_AT_ONCE)


def render_apart(source: str, conversation: TemplateInput, specials: Mapping[str, str]) -> str:
    """Render as `render` does, in a new process. Blocks. Raises TemplateError."""
    job = json.dumps({"source": source, "conversation": asdict(conversation), "specials": dict(specials)})
    with _slots:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-m", __name__],
                input=job.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},  # the worker's environment may contain secrets
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TemplateError(f"it takes more than {DEADLINE_S:g} s") from error
    answer: dict[str, str] = {}
    with contextlib.suppress(ValueError):  # the output is truncated if the system has stopped the process
        answer = json.loads(done.stdout)
    if "prompt" in answer:
        return answer["prompt"]
    raise TemplateError(answer.get("error", "it takes too much time or memory"))


def main() -> None:
    """Read a job from stdin and write the result to stdout, for `python -m`."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_PROCESSOR_S, MOST_PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.load(sys.stdin)
    try:
        prompt = render(job["source"], TemplateInput(**job["conversation"]), job["specials"])
        answer = {"prompt": prompt[:MOST_CHARACTERS]}
    except TemplateError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
