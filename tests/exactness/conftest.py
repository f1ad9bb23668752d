"""The stories that several modules read."""

from __future__ import annotations

import pytest
from exact_story import Story, StoryOf


@pytest.fixture(scope="session")
def story_of(tmp_path_factory: pytest.TempPathFactory) -> StoryOf:
    """The story of a world size, played once; one that failed is not tried again."""
    told: dict[int, Story | AssertionError] = {}

    def story(world: int) -> Story:
        if world not in told:
            try:
                told[world] = Story(tmp_path_factory.mktemp(f"ranks{world}-"), world)
            except AssertionError as error:
                told[world] = error
        found = told[world]
        if isinstance(found, AssertionError):
            pytest.fail(str(found))
        return found

    return story
