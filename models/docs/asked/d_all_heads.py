"""
All heads of 512 tokens on one page, offline
============================================

Asked of BertViz: `issue 82 <https://github.com/jessevig/bertviz/issues/82>`_. Its pages become slow or fail with many
tokens.
"""

import selfattn_models as models
from selfattn_models.pages import explorer

model = models.load("all-MiniLM-L6-v2")
text = "the old ship sailed over the dark water near the stones . " * 42
page = explorer(model, text)  # one file without network
len(model.tokens(text))

# %%
# ``page.save("heads.html")`` writes it. :doc:`/models/docs/guide/pages` shows such a page of a real model.
