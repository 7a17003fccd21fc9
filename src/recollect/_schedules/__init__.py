"""Schedules over chains, as `recollect.schedules` offers them: plain Python that knows nothing of torch."""
