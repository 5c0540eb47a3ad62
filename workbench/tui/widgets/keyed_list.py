"""A list of rows with keys: its cursor stays on its row when the list changes, and only changed rows are redrawn."""

from __future__ import annotations

from collections.abc import Mapping

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option


class KeyedList(OptionList):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._keys: list[str] = []

    @property
    def key(self) -> str | None:
        """Return the key of the row under the cursor."""
        at = self.highlighted
        return self._keys[at] if at is not None and at < len(self._keys) else None

    def select(self, key: str) -> bool:
        """Put the cursor on a row; False if no row has that key."""
        if key in self._keys:
            self.highlighted = self._keys.index(key)
        return key in self._keys

    def draw(self, prompts: Mapping[str, Content]) -> None:
        """Draw a row for each key."""
        kept, keys = self.key, list(prompts)
        if keys == self._keys:
            for place, prompt in enumerate(prompts.values()):
                if self.get_option_at_index(place).prompt != prompt:
                    self.replace_option_prompt_at_index(place, prompt)
            return
        self._keys = keys
        self.set_options([Option(prompt) for prompt in prompts.values()])
        if keys and not self.select(kept or ""):
            self.highlighted = 0
