"""The workshop's tools: notebooks as plain text, running them, and the editions made from them.

python -m course text notebooks/05_eviction.ipynb > five.md     a notebook as plain text, to edit
python -m course notebook five.md notebooks/05_eviction.ipynb   and back
python -m course run notebooks/*.ipynb                          run and store the outputs
python -m course try                                            run the learner editions, nothing answered
python -m course lab                                            the learner edition in lab/, to work in
python -m course workshop                                       the zips for learners and instructors
python -m course slides [--pdf]                                 build/slides, one page a chapter
python -m course drawings                                       the strips and the moving story, as SVG
python -m course smollm2                                        what the chapters show of SmolLM2, measured
python -m course site                                           the sources of the static site
python -m course agenda [--hours 3]                             the instructor's agendas, or one of them
python -m course answers class.csv                              a class's answers to the instructor's quiz
"""
