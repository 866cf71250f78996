"""Specimens: small real programs that wedge, or seem to, so that detectors and diagnoses can be tested on real ones.

    from closeranks.lab.specimens import SPECIMENS, start

    with start("different_collectives", world=4) as specimen:
        specimen.wait_onset()
        folder = specimen.capture()

`specs.py` says what each is and what a diagnosis of it must say; `programs/` holds the programs, laid out and named as
the engines' own modules, because a stack shows file and function names.
"""

from closeranks.lab.specimens.run import Running, SpecimenError, become, start
from closeranks.lab.specimens.specs import SPECIMENS, Specimen

__all__ = ["SPECIMENS", "Running", "Specimen", "SpecimenError", "become", "start"]
