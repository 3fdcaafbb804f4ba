"""The path tf.compat.v1.distribute, with the names of tf.distribute: `hpcdist.compat.v1.distribute` is hpcdist."""

import sys
from types import SimpleNamespace

v1 = SimpleNamespace(distribute=sys.modules["hpcdist"])
