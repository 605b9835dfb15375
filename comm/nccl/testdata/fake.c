// A library with NCCL's functions that notes how it was called, for tests of the calls themselves.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
  size_t size; unsigned magic, version;
  int blocking, clusters, minCTAs, maxCTAs; const char* netName; int splitShare;
} ncclConfig_t;

static char notes[1 << 16];
static size_t used;
static int failing, pending; // the result of the next collective, and that of work in flight

static int note(const char* format, ...) {
  va_list args;
  va_start(args, format);
  used += vsnprintf(notes + used, sizeof notes - used, format, args);
  va_end(args);
  int r = failing;
  failing = 0;
  return r;
}

const char* fakeNotes(void) { // and begins anew
  static char all[sizeof notes];
  memcpy(all, notes, used);
  all[used] = 0;
  used = 0;
  return all;
}
void fakeFail(int r) { failing = r; }
void fakePending(int r) { pending = r; }

int ncclGetVersion(int* v) { *v = 22809; return 0; }
int ncclGetUniqueId(ncclUniqueId* id) {
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(7 * i + 1);
  return 0;
}
int ncclCommInitRankConfig(void** comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* c) {
  int good = 0;
  for (int i = 0; i < 128; i++) good += id.internal[i] == (char)(7 * i + 1);
  *comm = (void*)0x600;
  return note("init %d of %d id %d size %zu magic %x version %u blocking %d ctas %d net %p share %d\n", rank, ranks, good,
      c->size, c->magic, c->version, c->blocking, c->minCTAs, (void*)c->netName, c->splitShare);
}
int ncclCommDestroy(void* c) { return note("destroy %p\n", c); }
int ncclCommAbort(void* c) { return note("abort %p\n", c); }
int ncclCommGetAsyncError(void* c, int* r) { *r = pending; return c == (void*)0x600 ? 0 : 4; }
const char* ncclGetLastError(void* c) { return c == (void*)0x600 ? "the cable is out" : ""; }
const char* ncclGetErrorString(int r) { return r == 6 ? "remote error" : "internal error"; }
int ncclMemAlloc(void** p, size_t n) { *p = (void*)0x7000; return note("alloc %zu\n", n); }
int ncclMemFree(void* p) { return note("free %p\n", p); }
int ncclCommRegister(void* c, void* p, size_t n, void** h) { *h = (void*)0x77; return note("register %p %p %zu\n", c, p, n); }
int ncclCommDeregister(void* c, void* h) { return note("deregister %p %p\n", c, h); }
int ncclGroupStart(void) { return note("start\n"); }
int ncclGroupEnd(void) { return note("end\n"); }
int ncclAllReduce(const void* src, void* dst, size_t n, int t, int op, void* c, void* s) {
  return note("AllReduce %p %p %zu %d %d %p %p\n", src, dst, n, t, op, c, s);
}
int ncclReduceScatter(const void* src, void* dst, size_t n, int t, int op, void* c, void* s) {
  return note("ReduceScatter %p %p %zu %d %d %p %p\n", src, dst, n, t, op, c, s);
}
int ncclAllGather(const void* src, void* dst, size_t n, int t, void* c, void* s) {
  return note("AllGather %p %p %zu %d %p %p\n", src, dst, n, t, c, s);
}
int ncclBroadcast(const void* src, void* dst, size_t n, int t, int root, void* c, void* s) {
  return note("Broadcast %p %p %zu %d %d %p %p\n", src, dst, n, t, root, c, s);
}
int ncclSend(const void* src, size_t n, int t, int peer, void* c, void* s) {
  return note("Send %p %zu %d %d %p %p\n", src, n, t, peer, c, s);
}
int ncclRecv(void* dst, size_t n, int t, int peer, void* c, void* s) {
  return note("Recv %p %zu %d %d %p %p\n", dst, n, t, peer, c, s);
}
