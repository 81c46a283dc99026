"""An answer whose engine is lost goes on at another instance."""

from collections.abc import Callable
from functools import partial

from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.exchange import Maker
from hetlb.options.resume.deaths import Deaths
from hetlb.options.resume.progress import Kept
from hetlb.options.resume.resume_keys import mistakes, ways_of
from hetlb.options.resume.resumed import Resumable


def hook(driver: Driver) -> Callable[..., Maker]:
    """Return what makes the maker of one request's attempts: called with kind, call, request."""
    return partial(Resumable, driver, Kept(), Deaths())


__all__ = ["hook", "mistakes", "ways_of"]
