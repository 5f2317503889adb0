"""What the tables of the report do not say by themselves."""

from __future__ import annotations

HEAD = """# Experiments

Made by `{command}`.

Everything here is a simulation: the routers, controllers and balancers are the servers' own, the
nodes are the reconstructed latencies of the case study in arXiv 2604.15039 (model `{model}`, 8 GPUs
per instance, 20 decode slots of 25 ms, 1024 output tokens unless said otherwise). The limit of 4
H200 + 8 H20 is {limit:.2f} req/s by the capacity model in expectation form; a rate "of the own
limit" is of the deployment's own.

Conversations: {trace}.

- Queues are finite (64 requests a node, {waiting} more at the gateway) and clients give up after
  {timeout:.0f} s. Closed loops have {clients} clients, {link_clients} where the link is slow.
- All latencies, and the 10 s and 30 s that make a request good, run until decoding begins: the TTFT
  and the wait for a decode slot.
- Cost is hours of an H20 instance per 1000 good requests; an H200 instance counts as two.
- The same seed gives every policy the same requests. Each row is one run of some thousand requests.
"""

GOALS = """
"Beside it" has the other policies that could have met the goal. The link goals are over the
mean-form references 1.77 and 2.25 req/s. `mix_step`: outputs change from 1024 to 512 or 1536
tokens, and the rate from ten minutes later on is compared with that of the best roles.
"""

LADDER = """
- At saturation every policy that keeps both prefill sides busy serves the same within a few per
  cent. While nothing changes, the paper's rule with the right t is as good as anything, and least
  predicted finish, which has no length rule at all, is as good as the paper's rule.
- Near the limit an adaptive t is usually slower than the exact one, and steadier where the sample
  is unlucky for that; four seeds cannot tell their means apart. Max-weight, which looks at queues
  and not at lengths, is faster than both.
- The upper rungs pay when something changes. Nobody has to know t or the roles then.
- Homogeneous clusters of equal cost serve less per price, but not by as much as those of equal
  count.
"""

SCENARIOS = {
    "steady": "Poisson arrivals.",
    "saturated": "A closed loop with low-discrepancy lengths: only throughput means something.",
    "bursts": "Three times the mean rate for 20 s, silence for 40 s, on average 0.7 of the limit: "
    "twice the limit while it lasts. Bursts fall elsewhere at another rate, so compare within one "
    "hardware only.",
    "link drop": "Poisson at half of the limit; counted while the link has 5 of its 100 Gbps.",
    "diurnal": "Lengths swing from x1 to x2 to x0.5 at 0.6 of the mean limit.",
    "failure": "0.6 of the limit; two nodes are gone for 10 minutes; 20 minutes are counted.",
    "trace": "Time-compressed conversations; 100 GiB of cache a node, granules of 512, news of "
    "caches 0.1 s late, 30 ms of RTT, pipelined link.",
}

LINK = """
A closed loop; dotted is what the capacity model allows (mean form). A fixed t loses what the link
no longer carries. Moving t alone recovers what is possible with the old roles, and the balancer
the rest. The line of t is ragged because the controller backs off from a full link and returns.
"""

DAY = """
Lengths from half to double within an hour and a half. Drawn are the planned roles and what is
served; the latencies are in the table "diurnal" above.
"""

CACHES = """
Good requests per second of every arm at its best N_p, offered rate and, for a fixed t, threshold.
"Paper" is the rule for a scarce link: every side counts its own hits, nothing moves. Goodput is a
cliff: past the limit a policy that shares the load well makes everybody late together, while a t
that is wrong keeps one of the two sides fast. So above the limit a bad t looks better than all
else; what it hides is admission control, which no policy here has.
"""

FRACTIONS = """
Throughput at saturation over that of the best whole split of the same hardware. `slices`: one node
alternates, with all its drains. `mixed`: one node does both under the balancer's budget; a is the
part of a decode step that a smaller batch does not save; its tokens take longer than 25 ms.
`held`: the same with so few slots that they do not, the best of several sizes; none does at a = 1.
"""
