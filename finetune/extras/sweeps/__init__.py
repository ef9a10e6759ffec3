"""Sweeps: several settings of one job, trained on one frozen base and compared on the same rows.

grid ─▶ members, each an ordinary run ─▶ running ─▶ halving: which go on ─▶ the table

"""
