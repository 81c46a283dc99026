"""Term of the score of `hetlb`: lost tries and overdue tokens, as the account of an instance shows them.

It enters the score as seconds that are added to the first token and to the whole answer: with `excess`, the
share of answers that are lost there and not at the other instances of the model, `excess / (1 - excess)`
tries are lost before one ends well, and each costs its time and the next try; a token that is overdue is
expected to take as long again. 0 of an instance whose answers end as well as elsewhere, so a fleet that is
well is rated as without it. The same account filters for every policy (`ReadyInstances.choices`): the term
alone would leave an instance no trial.
"""

from __future__ import annotations

from hetlb.balancer.core.policies.sight import Sight


def later_s(each: Sight) -> float:
    """Return the seconds by which an answer that ends well comes later than the forecast."""
    account = each.instance.account
    return account.later_s(each.end_s) if account.troubled else 0.0
