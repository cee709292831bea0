"""The router's settings as `baton up` has them: who starts a service on one machine wants to see it."""

from __future__ import annotations

from baton_router.settings import RouterSettings


class FrontSettings(RouterSettings):
    """The router of one machine."""

    page: bool = True
    """Show a page at `/`: the workers and what they do, the last requests as timelines, and a place to talk
    to the model. What it shows wants a key where keys are wanted."""
