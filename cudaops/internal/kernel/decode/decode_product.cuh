// The arguments of products with a single row, which decode_product.cu and decode_stream.cu compute.
#pragma once

struct Product {
  void* y;  // [n]
  const void *x, *w, *c;  // [depth], [n, depth] or gated [2·n, depth], [n]; c may be null or y
  const float* norm;  // [depth]; null without a norm
  int n, depth;
  float eps;
  int steady;  // no kernel that may still be running writes w, so it can be read before the preceding kernel ends
  int early;  // the next kernel may start before the preceding kernel has ended
  int isGELU;  // whether the gate is GELU instead of SiLU
};
