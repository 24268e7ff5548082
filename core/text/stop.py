"""Finding stop strings in text that arrives in pieces.

    stops "DE", "EF":     root ─D─▶ 1 ─E─▶ 2*        * a stop string ends here
                            └───E─▶ 3 ─F─▶ 4*        2's fallback is 3: after "DE", "E" may begin "EF"

    text so far ──▶ [ released | held back: the longest end of the text that begins some stop string ]

The strings form an Aho-Corasick automaton (Aho and Corasick 1975), read one character at a time: the depth of the
present state is exactly the number of characters to hold back, and how the text was cut can't change the outcome. Of
several stop strings the one that is complete first wins; of those complete at the same character, the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_ROOT = 0


class StopMatcher:
    """Watches one choice's text for its stop strings.

    Args:
        stops: the strings; may be empty.
        include_stop: keep the matched string in the text.

    Attributes:
        matched: the stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automaton = _Automaton(stops) if stops else None
        self._include_stop = include_stop
        self._state = _ROOT
        self._held = ""  # always as long as the state is deep
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add text; returns what can be released.

        Args:
            text: the next characters.
            may_stop: whether a stop string that ends within them counts (not before min_tokens tokens).

        After a match nothing more is released, and further text is ignored.
        """
        if self.matched is not None:
            return ""
        if self._automaton is None:
            return text
        step, found = self._automaton.step, self._automaton.found
        state = self._state
        for i, char in enumerate(text):
            state = step(state, char)
            if found[state] is not None:
                if may_stop:
                    return self._stop(found[state] or "", self._held + text[: i + 1])
                state = self._automaton.without_match(state)
        self._state = state
        text = self._held + text
        keep = self._automaton.depth[state]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """End the text: what was held back, when no stop string came of it."""
        held, self._held = self._held, ""
        self._state = _ROOT
        return held

    def _stop(self, stop: str, text: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Automaton:
    """Aho-Corasick over characters. Lists are indexed by state; state 0 is the root.

    Attributes:
        depth: characters of the text that the state stands for.
        found: the longest stop string that ends where this state does, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [_ROOT]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (target := self._next[state].get(char)) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return target

    def without_match(self, state: int) -> int:
        """The state in which only strings that can still be completed are remembered."""
        while state != _ROOT and not self._next[state]:
            state = self._fallback[state]
        return state

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(_ROOT)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self._next[state][char]
        self.found[state] = stop

    def _link(self) -> None:
        """Set fallbacks, breadth first: the longest proper end of a state's text that is a state too."""
        queue = deque(self._next[_ROOT].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                queue.append(child)
                fallback = self._fallback[child] = self.step(self._fallback[state], char)
                if self.found[child] is None:
                    self.found[child] = self.found[fallback]
