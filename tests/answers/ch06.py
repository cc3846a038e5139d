# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 6: offloading."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "step_seconds": [
        "arrive, leave = [], []\nfor i, (c, t) in enumerate(zip(compute, transfer)):\n"
        "    begin = max(arrive[-1:] + ([leave[i - buffers]] if i >= buffers else []) + [0])\n    arrive.append(begin + t)\n"
        "    leave.append(max(leave[-1:] + [arrive[-1]]) + c)\nreturn leave[-1]",
        "done = [0.0] * buffers\nlink = 0.0\nfor c, t in zip(compute, transfer):\n    link = max(link, done[-buffers]) + t\n"
        "    done.append(max(link, done[-1]) + c)\nreturn np.float64(done[-1])",
    ],
    "schedule": [
        "events = []\nfor i in range(layers):\n    if i == 0:\n        events.append(['ask', 0])\n"
        "    if i < layers - 1:\n        events.append(['ask', i + 1])\n"
        "    events += [['wait', i], ['attend', i]]\nreturn events",
        "yield 'ask', 0\nfor i in range(layers):\n    if i + 1 != layers:\n        yield 'ask', i + 1\n"
        "    yield 'wait', i\n    yield 'attend', i",
        "e = [('ask', 0)]\nfor i in range(1, layers):\n"
        "    e += [('ask', i), ('wait', i - 1), ('attend', i - 1)]\n"
        "return tuple(e + [('wait', layers - 1), ('attend', layers - 1)])",
    ],
}  # fmt: skip
