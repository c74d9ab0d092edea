"""C++ of the look-ups forward: gather rows, pool bags, and the gradient of per-sample weights.

Every function takes the look-ups as two tables of int64: ``Fixed`` (changes only when a table moves) and ``Call``
(changes every call). Their fields are named in the structs below and filled by ``cpu_lookup.py`` in the same order.
"""

from __future__ import annotations

LOOKUP = r"""
struct Fixed { const scalar* table; int64_t rows, mode, padding; };
struct Call {
  const void* ids; int64_t wide;       // int64 when wide, else int32; element (i, j) lies at i * step0 + j * step1
  int64_t size0, size1, step0, step1;
  const int64_t* offsets;              // bags + 1 entries; null: bags of size1 ids each
  int64_t bags;                        // rows of the output
  const scalar* weights;               // one per id, or null
  scalar* data; int64_t stride;        // output (forward) or its gradient (backward): row r lies at r * stride
  int64_t* winners;                    // max only: (bags, DIM) positions of the largest, -1 for none
  int64_t count() const { return size0 * size1; }
};
enum Mode { NONE, SUM, MEAN, MAX };
enum Status { FINE = 0, BAD_ID = 1, BAD_OFFSETS = 2 };
constexpr int64_t BLOCK = 128;   // output rows per task: 128 x 26 x 64 B stays in L2
constexpr int64_t AHEAD = 16;    // rows between prefetch and use
constexpr int64_t CHUNK = 1024;  // pairs per task of the backward sum; fixed, so that sums do not depend on threads
constexpr int64_t ALONE = 16384; // a table with more ids than this is sorted by all threads together

struct Fault { int64_t status, lookup, position, value; };

static void report(Fault* fault, int64_t status, int64_t lookup, int64_t position, int64_t value) {
  #pragma omp critical(heterps_fault)
  if (!fault->status || lookup < fault->lookup || (lookup == fault->lookup && position < fault->position))
    *fault = {status, lookup, position, value};
}

template <typename id_t>
static void read_ids(const Call& call, int64_t begin, int64_t count, int64_t* to) {
  const id_t* ids = static_cast<const id_t*>(call.ids);
  if (call.size1 == 1) {
    for (int64_t k = 0; k < count; k++) to[k] = ids[(begin + k) * call.step0];
  } else if (call.step0 == call.size1 * call.step1) {
    for (int64_t k = 0; k < count; k++) to[k] = ids[(begin + k) * call.step1];
  } else {
    int64_t i = begin / call.size1, j = begin % call.size1;
    for (int64_t k = 0; k < count; k++) {
      to[k] = ids[i * call.step0 + j * call.step1];
      if (++j == call.size1) { j = 0; i++; }
    }
  }
}

// Copies count ids from position begin on, and says whether all of them name a row.
static bool read_rows(const Fixed& fixed, const Call& call, int64_t lookup, int64_t begin, int64_t count, int64_t* to,
                      Fault* fault) {
  if (call.wide) read_ids<int64_t>(call, begin, count, to); else read_ids<int32_t>(call, begin, count, to);
  bool good = true;
  for (int64_t k = 0; k < count; k++) good &= uint64_t(to[k]) < uint64_t(fixed.rows);
  if (!good)
    for (int64_t k = 0; k < count; k++)
      if (uint64_t(to[k]) >= uint64_t(fixed.rows)) { report(fault, BAD_ID, lookup, begin + k, to[k]); break; }
  return good;
}

static inline int64_t bag_begin(const Call& call, int64_t bag) {
  return call.offsets ? call.offsets[bag] : bag * call.size1;
}

static bool offsets_are_good(const Call& call, int64_t begin, int64_t end) {
  if (!call.offsets) return true;
  if (call.offsets[0] != 0 || call.offsets[call.bags] != call.count()) return false;
  for (int64_t bag = begin; bag < end; bag++)
    if (call.offsets[bag] > call.offsets[bag + 1] || call.offsets[bag] < 0 || call.offsets[bag + 1] > call.count())
      return false;
  return true;
}

static void gather(const Fixed& fixed, const Call& call, int64_t lookup, int64_t begin, int64_t end, Fault* fault) {
  int64_t rows[BLOCK];
  const int64_t count = end - begin;
  if (!read_rows(fixed, call, lookup, begin, count, rows, fault)) return;
  for (int64_t k = 0; k < std::min(AHEAD, count); k++) prefetch_row(fixed.table + rows[k] * DIM);
  for (int64_t k = 0; k < count; k++) {
    if (k + AHEAD < count) prefetch_row(fixed.table + rows[k + AHEAD] * DIM);
    std::memcpy(call.data + (begin + k) * call.stride, fixed.table + rows[k] * DIM, DIM * sizeof(scalar));
  }
}

// Sum, mean or max of the rows of one bag; ids arrive in pieces of BLOCK so that bags may be of any length.
static void pool_bag(const Fixed& fixed, const Call& call, int64_t lookup, int64_t bag, Fault* fault) {
  real sums[DIM] = {};
  int64_t used = 0, rows[BLOCK];
  int64_t* winners = fixed.mode == MAX ? call.winners + bag * DIM : nullptr;
  if (winners) for (int64_t d = 0; d < DIM; d++) winners[d] = -1;
  const int64_t end = bag_begin(call, bag + 1);
  for (int64_t begin = bag_begin(call, bag); begin < end; begin += BLOCK) {
    const int64_t count = std::min(BLOCK, end - begin);
    if (!read_rows(fixed, call, lookup, begin, count, rows, fault)) return;
    for (int64_t k = 0; k < count; k++) prefetch_row(fixed.table + rows[k] * DIM);
    for (int64_t k = 0; k < count; k++) {
      if (rows[k] == fixed.padding) continue;
      const scalar* row = fixed.table + rows[k] * DIM;
      if (winners) {
        for (int64_t d = 0; d < DIM; d++)
          if (!used || load(row[d]) > sums[d]) { sums[d] = load(row[d]); winners[d] = begin + k; }
      } else if (call.weights) {
        const real weight = load(call.weights[begin + k]);
        for (int64_t d = 0; d < DIM; d++) sums[d] += load(row[d]) * weight;
      } else {
        for (int64_t d = 0; d < DIM; d++) sums[d] += load(row[d]);
      }
      used++;
    }
  }
  if (fixed.mode == MEAN && used) for (int64_t d = 0; d < DIM; d++) sums[d] /= real(used);
  for (int64_t d = 0; d < DIM; d++) store(call.data + bag * call.stride + d, sums[d]);
}

extern "C" int64_t heterps_forward(const Fixed* fixed, const Call* calls, int64_t num_lookups, int64_t num_threads,
                                   Fault* fault) {
  int64_t most = 0, total = 0;
  for (int64_t l = 0; l < num_lookups; l++) {
    most = std::max(most, (calls[l].bags + BLOCK - 1) / BLOCK);
    total += calls[l].count();
  }
  #pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (total > 2048)
  for (int64_t block = 0; block < most; block++)
    for (int64_t l = 0; l < num_lookups; l++) {
      const int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, calls[l].bags);
      if (begin >= end) continue;
      if (!offsets_are_good(calls[l], begin, end)) { report(fault, BAD_OFFSETS, l, begin, 0); continue; }
      if (fixed[l].mode == NONE) gather(fixed[l], calls[l], l, begin, end, fault);
      else for (int64_t bag = begin; bag < end; bag++) pool_bag(fixed[l], calls[l], l, bag, fault);
    }
  return fault->status;
}

// Gradient of the weights of each id: the product of its row with the gradient of its bag. to[l] may be null.
extern "C" int64_t heterps_weights_backward(const Fixed* fixed, const Call* calls, int64_t num_lookups, scalar** to,
                                            int64_t num_threads, Fault* fault) {
  for (int64_t l = 0; l < num_lookups; l++) {
    if (!to[l]) continue;
    const Call& call = calls[l];
    #pragma omp parallel for schedule(dynamic, 16) num_threads(num_threads) if (call.count() > 2048)
    for (int64_t bag = 0; bag < call.bags; bag++) {
      const scalar* grad = call.data + bag * call.stride;
      for (int64_t at = bag_begin(call, bag); at < bag_begin(call, bag + 1); at++) {
        int64_t row;
        if (!read_rows(fixed[l], call, l, at, 1, &row, fault)) break;
        real sum = 0;
        if (row != fixed[l].padding)
          for (int64_t d = 0; d < DIM; d++) sum += load(grad[d]) * load(fixed[l].table[row * DIM + d]);
        store(to[l] + at, sum);
      }
    }
  }
  return fault->status;
}
"""
