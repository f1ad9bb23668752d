"""`torchrelay completion`: shell completion scripts, generated from the argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from shlex import quote

from torchrelay.checkpoint.log.view import WORDS
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output, arg, verb

SELECTORS = (*WORDS, "epoch=", "tag=")
"""Selectors that may follow `RUN@`."""


@dataclass(frozen=True)
class CompletionOptions:
    """Completions after a subcommand: `verbs` and `options` with help texts, `choices` of options."""

    verbs: Mapping[str, str]
    options: Mapping[str, str]
    choices: Mapping[str, Sequence[str]]


def tree_of(parser: argparse.ArgumentParser, verb: str = "") -> Iterator[tuple[str, CompletionOptions]]:
    """Yield each subcommand, such as `ckpt why`, with its completions; the top level first, as ""."""
    fixed = [one for one in parser._actions if not one.option_strings and one.choices]
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {one.dest: one.help or "" for action in inner for one in action._choices_actions}
    helps |= {str(choice): "" for action in fixed if action not in inner for choice in action.choices or ()}
    options = [action for action in parser._actions if action.option_strings]
    yield (
        verb,
        CompletionOptions(
            helps,
            {name: _plain(action.help) for action in options for name in action.option_strings},
            {
                name: [str(choice) for choice in action.choices]
                for action in options
                for name in action.option_strings
                if action.choices
            },
        ),
    )
    for action in inner:
        for name, one in action.choices.items():
            yield from tree_of(one, f"{verb} {name}".strip())


def _plain(text: str | None) -> str:
    return (text or "").replace("%%", "%").replace("%(default)s", "")


def bash(tree: Mapping[str, CompletionOptions]) -> str:
    """Return the script for bash: `source <(torchrelay completion bash)`."""
    return f"""\
# bash completion of torchrelay: source <(torchrelay completion bash)
_torchrelay() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" verb="" word words options
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "${{verb:+$verb }}$word" in
{_alternatives(tree, "      ")}) verb="${{verb:+$verb }}$word" ;;
      *) [[ $word == -* ]] || break ;;
    esac
  done
  if [[ $cur == @ || $prev == @ ]]; then
    COMPREPLY=($(compgen -W {quote(" ".join(SELECTORS))} -- "${{cur#@}}"))
    return
  fi
  case "$verb $prev" in
{_choices(tree, 'COMPREPLY=($(compgen -W {} -- "$cur")); return')}
  esac
  case "$verb" in
{_cases(tree)}
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$cur"))
  elif [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
  else
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  fi
}}
complete -F _torchrelay torchrelay
"""


def zsh(tree: Mapping[str, CompletionOptions]) -> str:
    """Return the script for zsh: `source <(torchrelay completion zsh)`, or `_torchrelay` in `$fpath`."""
    return f"""\
#compdef torchrelay
# zsh completion of torchrelay: source <(torchrelay completion zsh)
_torchrelay() {{
  local verb="" word words_of options prev="${{words[CURRENT-1]}}"
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "${{verb:+$verb }}$word" in
{_alternatives(tree, "      ")}) verb="${{verb:+$verb }}$word" ;;
      *) [[ $word == -* ]] || break ;;
    esac
  done
  case "$verb $prev" in
{_choices(tree, "compadd -- ${{(s: :):-{}}}; return")}
  esac
  case "$verb" in
{_cases(tree).replace("words=", "words_of=")}
  esac
  if [[ $PREFIX == -* ]]; then
    compadd -- ${{(s: :)options}}
  elif [[ -n $words_of ]]; then
    compadd -- ${{(s: :)words_of}}
  else
    _files
  fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit -u; }}
if [[ $funcstack[1] == _torchrelay ]]; then _torchrelay "$@"; else compdef _torchrelay torchrelay; fi
"""


def fish(tree: Mapping[str, CompletionOptions]) -> str:
    """Return the script for fish: `torchrelay completion fish | source`."""
    lines = ["# fish completion of torchrelay: torchrelay completion fish | source"]
    for typed, one in tree.items():
        # "this subcommand was typed and no deeper one yet"
        seen = [f"__fish_seen_subcommand_from {word}" for word in typed.split()]
        seen += [f"not __fish_seen_subcommand_from {' '.join(one.verbs)}"] if one.verbs else []
        here = "; and ".join(seen)
        for name, text in one.verbs.items():
            lines.append(f"complete -c torchrelay -f -n {quote(here)} -a {name} -d {quote(text)}")
        for name, text in one.options.items():
            form = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            given = f" -x -a {quote(' '.join(one.choices[name]))}" if name in one.choices else ""
            lines.append(f"complete -c torchrelay -n {quote(here)} {form}{given} -d {quote(text)}")
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[[Mapping[str, CompletionOptions]], str]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}


def _alternatives(tree: Mapping[str, CompletionOptions], indent: str) -> str:
    return indent + "|".join(quote(verb) if " " in verb else verb for verb in tree if verb)


def _choices(tree: Mapping[str, CompletionOptions], then: str) -> str:
    return "\n".join(
        f"    {quote(f'{verb} {name}')}) {then.format(quote(' '.join(given)))} ;;"
        for verb, one in tree.items()
        for name, given in one.choices.items()
    )


def _cases(tree: Mapping[str, CompletionOptions]) -> str:
    return "\n".join(
        f"    {quote(verb)}) words={quote(' '.join(one.verbs))} options={quote(' '.join(one.options))} ;;"
        for verb, one in tree.items()
    )


@verb(
    "print a shell completion script",
    arg("shell", "for bash: source <(torchrelay completion bash)", choices=tuple(SHELLS)),
)
def completion(chosen: argparse.Namespace, output: Output) -> int:
    """Print the script."""
    from torchrelay.tools.cli.main import whole_parser  # imports all subcommands

    script = SHELLS[chosen.shell](dict(tree_of(whole_parser())))
    output.result({"shell": chosen.shell, "script": script}, script.splitlines())
    return 0
