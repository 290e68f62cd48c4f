"""A cache at work, step by step: what each step held, read, wrote, copied, evicted and gave back.

    from kvframe.inspection import Recorder

    recorder = Recorder(engine)
    steps = [recorder.step(events) for events in engine.steps(requests)]
"""

from kvframe.inspection.recorder import Recorder

__all__ = ["Recorder"]
