"""What features of a root can add to counting, by replay: tokens a second of ways to choose a tree before drafting.

    latebranch selector collect --config configs/default.yaml --out roots/ --temperatures 0.6 1 --stride 12 --trees 2
    python -m benchmarks.ceiling roots/ --config configs/default.yaml            # LATEBRANCH_DTYPE sets another precision

Counting is the server's: it observes sampled outcomes of the trees that it chooses. Each other way predicts every tree's
tokens from what is known before drafting. `linear` is ridge regression, without features of the root (`request`), with
them, and with those of the root before, as a choice that is reused has them. `residual` begins as counting and learns
online a shift of the log-odds of acceptance, linear in the features. `boosting`, if scikit-learn is installed, may learn
any function of the features. The oracle has the outcomes. Ways that learn offline are tested on prompts that they have
not seen. Intervals are of a bootstrap over prompts.
"""
