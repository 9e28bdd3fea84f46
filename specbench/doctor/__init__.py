"""What `specbench doctor` finds out: is the installation sound, what can the machine do, do two models fit.

`diagnose` looks and measures, `text` and `document` tell. A finding is a claim with a mark; a number that
could not be had is None.
"""

from specbench.doctor.examination import Diagnosis, diagnose
from specbench.doctor.findings import Finding
from specbench.doctor.render import document, text

__all__ = ["Diagnosis", "Finding", "diagnose", "document", "text"]
