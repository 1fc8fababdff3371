"""What the page says around its figures: terms are defined where they are used."""

TABLE = """Useful tokens are response tokens that were trained, per second of rollout. The bubble ratio is the idle
share of the request slots while rollout is on. The acceptance length is the tokens that a step which verifies drafts
emits, 1 without drafts. Staleness is the policy versions between a trained group's oldest token and the policy that it
trains."""

LANES = """<b>{name}.</b> A lane is a replica. The blue area is the requests that run there over {height}; the colour
above it says why the other slots are empty. Right: the filled share of the replica's slots while rollout is on."""
ITS_SLOTS, THEIR_MOST = "its slots", "the most that ran at a time"
PAUSES = " Where the run had stopped before it was resumed, time is cut out ({count} times)."
RUNS_ON = """ Engines run on while the actor trains. What ran at the end and was never trained is not in the log, so
that the end looks emptier than it was."""

SHARES = """A moment has one reason for all slots that are empty then, so shares add up to one. Where engines stop
while the actor trains, a rollout lasts from the first start to the last end between two trainings; where they run on,
from one batch to the next. Bubble ratio = &Sigma; (Q &minus; r) dt / (Q &Sigma; dt) over the rollouts, with r of Q
request slots running for dt seconds: all of a rollout that is not busy. Logged: what the run itself said of it,
<code>rollout/bubble_ratio</code>, weighted alike. Where engines run on it reckons with what still ran at
the batch before that could say since when."""
BUBBLES = """<b>Each rollout of {name}.</b> What is not blue is its bubble ratio, to be read beside the useful tokens
per second: a bubble can be cut by throwing work away."""

REQUESTS = """<b>{name}, step {step}.</b> A bar is a request in a slot of its replica; the paler ones were never
trained. The colour between bars says why a slot is empty. Hold the pointer over a bar to read whose it is, how long it
was predicted to be and, where samples are placed by plan, why it is there.{some}"""
SOME_REPLICAS = " Of {every} replicas those that ended last are shown: {shown}."
AROUND = "<b>{name}, steps {first} to {last}</b>, as in the lanes of the whole run."

LENGTHS = """<b>Predicted against real lengths, {name}.</b> A dot is a response ({count} in all, of which {shown} are
drawn). Line and band: median and 10th to 90th percentile of real lengths, by predicted length. On the dotted line
both are equal. Half of the predictions are within a factor of {factor:.2f}."""
NO_PREDICTIONS = """The request log holds no predicted lengths, so this is what the run said of its forecasts, by
epoch."""
RANK = """<b>Rank correlation</b> (Spearman) of forecast and real lengths, of the groups completed in the epoch,
forecast before any of their responses began. 1 is the right order, 0 none at all."""

ACCEPTANCE_LENGTH = """<b>Acceptance length</b>: tokens that a step which verifies drafts emits, 1 + accepted tokens /
such steps."""
ACCEPTANCE_RATE = "<b>Acceptance rate</b>: accepted over drafted tokens."

STAGES = """<b>{name}</b>: seconds of each step by verl's timers, stacked. Rollout is what the trainer waits
for{on}."""
STAGES_ON = ", though the engines go on while it trains"
REWARD = "<b>Reward</b>: mean of each step (thin) and of each epoch (dots)."
USEFUL = "<b>Useful tokens</b>: trained response tokens per second of rollout."
LENGTH = """<b>Response length</b>, mean of each step: where two runs differ in it, so do their seconds per step."""
STALENESS = """<b>Staleness</b>: policy versions between the oldest token of a trained group and the policy that it
trains, mean of each step."""

MATCHED = """A run whose responses get shorter has shorter steps, whatever was done to its engine. So steps are
compared only with steps of the other run whose mean response length is in the same bin, a tenth wide: in each bin the
medians of response tokens per second of rollout. For as many tokens to make, their ratio is the inverse one of the
seconds. The first epoch is left out: there is no history in it yet. Equal means do not make equal distributions: of
two rollouts with one mean the one with the longer tail is slower."""
UNMATCHED = """After the first epoch no step of one run is as long as a step of the other, so there is no ratio at
matched lengths."""
RATIO = """{first} makes {ratio:.2f} times the tokens per second of {second}"""
SPREAD = """(geometric mean over {bins} bins, whose ratios are {low:.2f} to {high:.2f}, weighted by the steps of the run
that has fewer there; {alone} and {other} steps have no counterpart)"""
SCATTER = """<b>Speed against length</b>, a dot a step, hollow in the first epoch. Shaded: bins in which both runs
have steps, with their medians."""

FOOTER = "Drag over a timeline to zoom in, double-click to see all of it again."
