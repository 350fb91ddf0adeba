"""Muon: updates of weight matrices that are orthogonalised, with AdamW for all other parameters."""
