"""Texts of the page. Terms are defined where they are used."""

TABLE = """Useful tokens are trained response tokens per second of rollout. The bubble ratio is the idle share of the
request slots during rollout. Tokens per step is the acceptance length: the mean number of tokens emitted by a step that
verifies drafts, 1 without drafts. Staleness is the number of policy versions between a trained group's oldest token and
the policy that it trains."""

LANES = """<b>{name}.</b> Each lane is a replica. The blue area shows the running requests, relative to {height}. The
colour above it shows why the other slots are empty. Right: the filled share of the replica's slots during rollout."""
ITS_SLOTS, MOST_REQUESTS = "its slots", "the most requests that ran at a time"
PAUSES = " Pauses between two starts of the run are cut out ({count} times)."
RUNS_ON = """ Engines continue while the actor trains. Requests that ran at the end and were never trained are not in
the log, so the end looks emptier than it was."""

SHARES = """Each moment has one reason for all empty slots but those of samples between two turns (tool), so the shares
add up to one. If engines stop while the actor
trains, a rollout lasts from the first start to the last end between two trainings. If they continue, it lasts from one
batch to the next. Bubble ratio = &Sigma; (Q &minus; r) dt / (Q &Sigma; dt) over the rollouts, with r of Q request slots
running for dt seconds: all slot time of a rollout that is not busy."""
BUBBLES = """<b>Each rollout of {name}.</b> All that is not blue is the bubble ratio. Read it together with the useful
tokens per second: wasted tokens fill slots, too."""

RANK = """<b>Rank correlation</b> (Spearman) of forecast and actual lengths, for the groups completed in the epoch.
Forecasts were made before any of their responses began. 1 is the right order, 0 is no correlation."""

ACCEPTANCE_LENGTH = """<b>Acceptance length</b>: mean number of tokens emitted by a step that verifies drafts, 1 +
accepted tokens / such steps."""
ACCEPTANCE_RATE = "<b>Acceptance rate</b>: accepted over drafted tokens."

STAGES = """<b>{name}</b>: seconds of each step by verl's timers, stacked. Rollout is the time that the trainer waits
for it{on}."""
STAGES_ON = ", although the engines continue during training"
REWARD = "<b>Reward</b>, mean of each step."
USEFUL = "<b>Useful tokens</b>: trained response tokens per second of rollout."
LENGTH = """<b>Response length</b>, mean of each step. If two runs differ in length, they differ in seconds per step,
too."""
STALENESS = """<b>Staleness</b>: policy versions between the oldest token of a trained group and the policy that it
trains, mean of each step."""

MATCHED = """Shorter responses make shorter steps, whatever was done to the engine. So each step is compared only with
steps of the other run whose mean response length is in the same bin. Bins are 10% wide, and the speeds compared are the
medians of response tokens per second of rollout. For equal numbers of tokens, the ratio of seconds is the inverse. The
first epoch is left out, because the history is still empty. Equal means do not imply equal distributions: of two
rollouts with one mean, the one with the longer tail is slower."""
UNMATCHED = """After the first epoch, no step of one run has the mean length of a step of the other, so there is no
ratio at matched lengths."""
RATIO = """<b>{first} generates {ratio:.2f} times the tokens per second of {second}</b> (geometric mean over {bins} bins
with ratios from {low:.2f} to {high:.2f}, weighted by the smaller number of steps)."""

FOOTER = "Drag over a timeline to zoom in; double-click to reset the zoom."
