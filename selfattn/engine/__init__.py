"""What a model says to the core: a transformer's settings and arrays, rounded weights, rotary angles, decoding and sampling."""
