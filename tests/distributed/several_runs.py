"""Run train.main several times in one launch: the argument is a JSON list of argument lists."""

import json
import sys

from accelerate.state import AcceleratorState, GradientState

import train
from adaptive.config import parse
from adaptive.engine import Engine

for arguments in json.loads(sys.argv[1]):
    train.main(parse(arguments))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
Engine.leave()
