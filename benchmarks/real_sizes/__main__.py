"""Measure the product's parts at the sizes of real models: ``python -m benchmarks.real_sizes PART``."""

import typer

from benchmarks.real_sizes import budget, copies, history, planning, sampler

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.command("sampler", help=sampler.__doc__)(sampler.main)
app.command("budget", help=budget.__doc__)(budget.main)
app.command("planning", help=planning.__doc__)(planning.main)
app.command("history", help=history.__doc__)(history.main)
app.command("copies", help=copies.__doc__)(copies.main)


if __name__ == "__main__":
    app()
