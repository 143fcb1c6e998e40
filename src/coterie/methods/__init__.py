"""The methods, one file each, and the table of their names."""

from coterie.methods.fedavg import FedAvg
from coterie.methods.fedcbo import FedCBO
from coterie.methods.ifca import IFCA
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.options import Options

METHODS: dict[str, type[Options]] = {
    "fedcbo": FedCBO,
    "local": Local,
    "fedavg": FedAvg,
    "ifca": IFCA,
    "oracle": Oracle,
}
__all__ = ["IFCA", "METHODS", "FedAvg", "FedCBO", "Local", "Oracle"]
