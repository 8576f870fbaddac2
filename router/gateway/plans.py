"""The plans that were made for a request, for a client that asks for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from fastapi import Request

from router.gateway.jobs import Job

PLAN_HEADER = "x-headwater-plan"
"""With it in a request, the response has one, too: the plans that were made for its prompts, as JSON."""
MAX_PLANS, MAX_PLAN_HEADER = 16, 4096
"""Prompts whose plans are shown, the latest of each; if that is longer than so many bytes, only the first prompt's last
plan is. Proxies and clients limit the size of headers."""


def plans(request: Request, jobs: list[Job]) -> Callable[[], dict[str, str]]:
    """For `headers=` of `respond`: the plans that have been made by then, if the client asked for them."""

    def headers() -> dict[str, str]:
        if PLAN_HEADER not in request.headers:
            return {}
        for shown in (MAX_PLANS, 1):
            text = json.dumps([[asdict(plan) for plan in job.prompt.plans[-shown:]] for job in jobs[:shown]])
            if len(text) <= MAX_PLAN_HEADER:
                break
        return {PLAN_HEADER: text}

    return headers
