// Attention whose keys and values are kept as bytes with scales.
#define KV_Q8
#include "attend.cu"
