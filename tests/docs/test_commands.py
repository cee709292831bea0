"""The commands that pages show exist, with flags, targets, values and kinds. `test_tutorials` runs some."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml

from baton_cli.main import create_app
from baton_cli.peers import ALIASES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("baton", "make", "python", "python3", "kubectl", "helm", "curl")
VERBS = frozenset({
    *("annotate", "apply", "config", "cordon", "cp", "create", "delete", "describe", "drain", "edit"),
    *("events", "exec", "explain", "get", "kustomize", "label", "logs", "patch", "port-forward"),
    *("rollout", "scale", "top", "wait"),
})  # fmt: skip
OTHERS = frozenset({
    *("all", "certificate", "configmap", "crd", "daemonset", "deploy", "deployment", "endpointslices"),
    *("events", "gateway", "hpa", "httproute", "ingress", "isvc", "job", "jobs", "lease", "leases"),
    *("namespace", "networkpolicy", "node", "nodes", "ns", "pdb", "pod", "podmonitors", "pods"),
    *("prometheusrule", "pv", "pvc", "replicaset", "rs", "sa", "scaledobjects", "secret", "secrets"),
    *("service", "services", "servicemonitor", "statefulset", "storageclass", "svc"),
})  # fmt: skip
"""Kinds of Kubernetes and of others that pages name."""

ASSIGNED = re.compile(r"^([A-Z_]+=\S* )+")


def commands_of(text: str) -> Iterator[list[str]]:
    """Commands in blocks of a page, with the lines on which they go on, in words. Pipes end them."""
    lines = iter(re.sub(r" *\\\n\s*", " ", text).splitlines())
    fenced = False
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif line.startswith("$ ") if fenced else line.startswith("    "):
            command = ASSIGNED.sub("", line.strip().removeprefix("$ "))
            if command.split(" ")[0] in PROGRAMS:
                yield words_of(command)


def words_of(command: str) -> list[str]:
    """Quoted words that go on in the next line end with the line."""
    for end in ("", "'", '"'):
        try:
            lexer = shlex.shlex(command + end, posix=True, punctuation_chars="|;&<>")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            continue
        ends = (n for n, word in enumerate(words) if set(word) <= set("|;&<>"))
        return words[: next(ends, len(words))]
    raise AssertionError(command)


FOUND = [
    pytest.param(words, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, words in enumerate(commands_of(page.read_text()))
]


@cache
def options_of(name: str) -> dict[str, set[str]]:
    """The flags of a command and of those below it, by its words."""
    command = typer.main.get_command(create_app([name]))

    def below(words: str, command: object) -> Iterator[tuple[str, set[str]]]:
        yield words, {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}  # type: ignore[attr-defined]
        for name, further in getattr(command, "commands", {}).items():
            yield from below(f"{words} {name}".strip(), further)

    return dict(below("", command))


@cache
def our_kinds() -> set[str]:
    """All names by which kubectl knows the custom resources."""
    names = [yaml.safe_load(path.read_text())["spec"]["names"] for path in (ROOT / "crds").glob("*.yaml")]
    return {
        name
        for one in names
        for name in (one["plural"], one["singular"], *one.get("shortNames", ()), *one.get("categories", ()))
    }


def check_baton(words: list[str]) -> str:
    plain = [word for word in words if not word.startswith("-")]
    if not plain:
        return ""
    options = options_of(plain[0])
    named = next((" ".join(plain[:n]) for n in (2, 1) if " ".join(plain[:n]) in options), None)
    if named is None:
        return f"there is no command {plain[0]}"
    known = options[named] | {"--help", "--help-all", "--version"}
    known |= {alias for names in ALIASES.values() for aliases in names.values() for alias in aliases}
    flags = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return ", ".join(f"baton {named} has no flag {flag}" for flag in flags if flag not in known)


def check_make(words: list[str]) -> str:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [word for word in words if not word.startswith("-") and "=" not in word]
    return ", ".join(f"there is no target {word}" for word in asked if word not in targets)


def check_helm(words: list[str]) -> str:
    values = yaml.safe_load((ROOT / "charts/baton/values.yaml").read_text())
    if not any("baton" in word and "/" in word for word in words):
        return ""  # another chart
    missing: list[str] = []
    for flag, given in pairwise(words):
        if flag in ("--set", "--set-string", "--set-file", "--set-json"):
            for path in (one.partition("=")[0] for one in re.split(r",(?=[\w.]+=)", given)):
                place = values
                for part in re.split(r"(?<!\\)\.", re.sub(r"\[\d+\]", "", path)):
                    if isinstance(place, dict) and place and part not in place:
                        missing.append(f"the chart has no value {path}")
                        break
                    place = place.get(part) if isinstance(place, dict) else None
    return ", ".join(missing)


def check_kubectl(words: list[str]) -> str:
    if "--" in words:
        inner = words[words.index("--") + 1 :]
        if inner and inner[0] in CHECKS and (inside := CHECKS[inner[0]](inner[1:])):
            return inside
        words = words[: words.index("--")]
    plain = [word for word in words if not word.startswith("-")]
    verb = next((word for word in plain if word in VERBS), None)
    if verb is None:
        return f"kubectl has no command {plain[0]}"
    wrong: list[str] = []
    if "--raw" not in words and verb in ("get", "describe", "delete", "explain", "edit", "patch"):
        following = plain[plain.index(verb) + 1 :][:1]
        for kind in (kind for word in following for kind in word.partition("/")[0].split(",")):
            name = kind.partition(".")[0].lower()
            if name not in OTHERS | our_kinds() and not kind.startswith(("$", "<")):
                wrong.append(f"there is no kind {kind}")
    return ", ".join(wrong)


def check_python(words: list[str]) -> str:
    if words[:1] == ["-m"] and importlib.util.find_spec(words[1]) is None:
        return f"there is no module {words[1]}"
    return ""


CHECKS = {
    "baton": check_baton,
    "make": check_make,
    "helm": check_helm,
    "kubectl": check_kubectl,
    "python": check_python,
    "python3": check_python,
}


def test_pages_have_commands_of_each_program() -> None:
    counted = Counter(found.values[0][0] for found in FOUND)  # type: ignore[index]
    assert counted["baton"] > 30 and counted["kubectl"] > 80 and counted["make"] > 20 and counted["helm"] > 10


@pytest.mark.parametrize("words", FOUND)
def test_command_of_a_page_exists(words: list[str]) -> None:
    check = CHECKS.get(words[0])
    assert check is None or check(words[1:]) == "", " ".join(words)


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("baton serve smollm2 --kv-memory-teir 1GiB", "no flag --kv-memory-teir"),
        ("baton serv smollm2", "no command serv"),
        ("make tset", "no target tset"),
        ("helm install baton charts/baton --set worker.replicas=2", "no value worker.replicas"),
        ("kubectl get inferenceservises", "no kind inferenceservises"),
        ("kubectl exec deploy/a -- baton status --name-space=b", "no flag --name-space"),
    ],
)
def test_command_that_does_not_exist_is_named(command: str, wrong: str) -> None:
    program, *words = words_of(command)
    assert wrong in CHECKS[program](words)
