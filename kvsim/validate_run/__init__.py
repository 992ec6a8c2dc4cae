"""A recorded engine run, simulated: predicted against measured.

A run is a folder with `meta.json` (the engine's arguments), `requests.jsonl` (times per request) and `timeseries.csv`
(running, waiting, KV usage by the second). Queue times come from the run; everything else is predicted. Measured times
are read by the comparison alone.
"""

from __future__ import annotations

from kvsim.validate_run.comparison import Comparison as Comparison
from kvsim.validate_run.comparison import compare as compare
from kvsim.validate_run.comparison import other_pool as other_pool
from kvsim.validate_run.comparison import plot as plot
from kvsim.validate_run.metrics import METRICS as METRICS
from kvsim.validate_run.metrics import measured_metrics as measured_metrics
from kvsim.validate_run.overhead import fit_overhead as fit_overhead
from kvsim.validate_run.prediction import Prediction as Prediction
from kvsim.validate_run.prediction import predict as predict
from kvsim.validate_run.recorded import RecordedRun as RecordedRun
from kvsim.validate_run.recorded import load_run as load_run
from kvsim.validate_run.setting import Setting as Setting
from kvsim.validate_run.setting import setting_of as setting_of
