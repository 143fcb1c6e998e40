"""The methods, one file each, and the table of their names."""

from coterie.methods.cfl import CFL
from coterie.methods.cobo import CoBo
from coterie.methods.dfedavgm import DFedAvgM
from coterie.methods.fedavg import Ditto, FedAvg, FedProx
from coterie.methods.fedcb2o import FedCB2O
from coterie.methods.fedcbo import FedCBO
from coterie.methods.federated_clustering import FederatedClustering
from coterie.methods.ifca import IFCA
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle, OracleMax, OracleMin
from coterie.methods.validation_weights import ValidationWeights
from coterie.methods.wecfl import WeCFL
from coterie.options import Options

METHODS: dict[str, type[Options]] = {
    "fedcbo": FedCBO,
    "fedcb2o": FedCB2O,
    "cobo": CoBo,
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "ditto": Ditto,
    "federated_clustering": FederatedClustering,
    "validation_weights": ValidationWeights,
    "ifca": IFCA,
    "cfl": CFL,
    "wecfl": WeCFL,
    "dfedavgm": DFedAvgM,
    "oracle": Oracle,
    "oracle-min": OracleMin,
    "oracle-max": OracleMax,
}
__all__ = [
    "CFL", "IFCA", "METHODS", "CoBo", "DFedAvgM", "Ditto", "FedAvg", "FedCB2O", "FedCBO", "FedProx",
    "FederatedClustering", "Local", "Oracle", "OracleMax", "OracleMin", "ValidationWeights", "WeCFL",
]  # fmt: skip
