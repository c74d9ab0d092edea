"""C++ body of the update unit: optimizer steps on the rows that got a gradient, and catching up the rows that did
not.

One function, ``apply``, is one step of a rule for one row; a step without gradient is the same function with zeros. A
row that got none for k steps is caught up by replaying those k steps, so nothing is approximated but the tail: after
``horizon`` steps the momentum is below 1e-9 of what it was, stops moving the row, and only decays.

step         1   2   3   4   5   6        last[row] = 2: steps 3, 4, 5 are replayed when the row is read, gradient
*   *   .   .   .   *        or at the latest just before step 6 gives it a gradient

``history`` holds one ``Step`` per step of the table, from step 1 on, so rates may change from step to step.
"""

from __future__ import annotations

STEP_FIELDS = ("rate", "bias2", "beta1", "beta2", "gain", "eps", "decay", "sum1", "sum2", "sum_decay")
"""Fields of the struct ``Step``, all float64."""

UPDATE = r"""
enum Rule { SGD, MOMENTUM, NESTEROV, ADAGRAD, RMSPROP, ADAM };
struct Step {
  double rate, bias2, beta1, beta2;  // bias2: sqrt(1 - beta2**t), Adam only; beta1: also the momentum of SGD
  double gain;                       // what a gradient is multiplied by: -1 to maximize, 1 - dampening, ...
  double eps, decay;                 // decay: 1 - lr * weight_decay, decoupled (AdamW), else 1
  double sum1, sum2, sum_decay;      // sums of log beta1, log beta2, log decay over all steps up to this one
};
struct Table {
  scalar *weight, *first, *second;   // (num_rows, DIM); momentum and second moment, null where the rule has none
  int32_t* last;                     // (num_rows): step a row stands at; null: rows do not move without a gradient
  int64_t num_rows;
  const void* rows; int64_t wide, row_step;  // row i lies at i * row_step, int64 when wide, else int32; null: all rows
  const scalar* grad;                // (count, DIM)
  int64_t count;
  const Step* history;               // history[t] is step t; history[0] has sums of 0
  int64_t now;                       // step to be made (update) or to be at (catch up)
  int64_t horizon;                   // steps after which momentum moves nothing; at least 1
  int64_t size() const { return rows ? count : num_rows; }
  int64_t row(int64_t i) const {
    if (!rows) return i;
    return wide ? static_cast<const int64_t*>(rows)[i * row_step] : static_cast<const int32_t*>(rows)[i * row_step];
  }
};
constexpr int64_t AHEAD = 8, PIECE = 256;

static inline void prefetch_state(const Table& table, int64_t row) {
  prefetch_row(table.weight + row * DIM);
  if (table.first) prefetch_row(table.first + row * DIM);
  if (table.second) prefetch_row(table.second + row * DIM);
}

static inline void load_row(const scalar* from, real* to) { for (int64_t d = 0; d < DIM; d++) to[d] = load(from[d]); }
static inline void store_row(real* from, scalar* to) { for (int64_t d = 0; d < DIM; d++) store(to + d, from[d]); }

// a * b + c as BLAS has it, which torch calls to add sparse gradients: rounded once where the processor can.
static inline real fused(real a, real b, real c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// One step of a row: weight w, momentum m, second moment v, gradient g.
template <int RULE>
static inline void apply(real* w, real* m, real* v, const real* g, const Step& step) {
  const real rate = real(step.rate), eps = real(step.eps), gain = real(step.gain);
  const real beta1 = real(step.beta1), beta2 = real(step.beta2);
  if (RULE == SGD) {
    for (int64_t d = 0; d < DIM; d++) w[d] = fused(-rate, gain * g[d], w[d]);
  } else if (RULE == MOMENTUM || RULE == NESTEROV) {
    for (int64_t d = 0; d < DIM; d++) {
      m[d] = beta1 * m[d] + gain * g[d];
      // beta2: sign of the plain gradient that Nesterov adds (1, or -1 to maximize)
      w[d] -= rate * (RULE == NESTEROV ? beta2 * g[d] + beta1 * m[d] : m[d]);
    }
  } else if (RULE == ADAGRAD) {
    for (int64_t d = 0; d < DIM; d++) {
      v[d] += g[d] * g[d];
      w[d] = fused(-rate, gain * g[d] / (std::sqrt(v[d]) + eps), w[d]);
    }
  } else if (RULE == RMSPROP) {
    const real rest = real(1 - step.beta2);
    for (int64_t d = 0; d < DIM; d++) {
      v[d] = v[d] * beta2 + rest * g[d] * g[d];
      w[d] -= rate * (gain * g[d]) / (std::sqrt(v[d]) + eps);
    }
  } else {
    const real rest1 = real(1 - step.beta1), rest2 = real(1 - step.beta2);
    const real bias2 = real(step.bias2), decay = real(step.decay);
    for (int64_t d = 0; d < DIM; d++) {
      m[d] += rest1 * (gain * g[d] - m[d]);
      v[d] = v[d] * beta2 + rest2 * g[d] * g[d];
      w[d] = w[d] * decay - rate * m[d] / (std::sqrt(v[d]) / bias2 + eps);
    }
  }
}

template <int RULE>
struct Row {  // a row in registers, written back when done
  static constexpr bool FIRST = RULE == MOMENTUM || RULE == NESTEROV || RULE == ADAM;
  static constexpr bool SECOND = RULE == ADAGRAD || RULE == RMSPROP || RULE == ADAM;
  real w[DIM], m[FIRST ? DIM : 1], v[SECOND ? DIM : 1];
  Row(const Table& table, int64_t row) {
    load_row(table.weight + row * DIM, w);
    if (FIRST) load_row(table.first + row * DIM, m);
    if (SECOND) load_row(table.second + row * DIM, v);
  }
  void write(const Table& table, int64_t row) {
    store_row(w, table.weight + row * DIM);
    if (FIRST) store_row(m, table.first + row * DIM);
    if (SECOND) store_row(v, table.second + row * DIM);
  }
};

// Steps (from, to] of a row without gradient.
template <int RULE>
static void replay(const Table& table, int64_t from, int64_t to, real* w, real* m, real* v) {
  if (RULE == SGD || RULE == ADAGRAD || from >= to) return;
  bool still = RULE == RMSPROP;  // moves nothing: only its second moment decays
  if (!still) {
    still = true;
    for (int64_t d = 0; d < DIM; d++) still &= m[d] == 0;
  }
  const real zeros[DIM] = {};
  int64_t at = from;
  if (!still)
    for (const int64_t end = std::min(to, from + table.horizon); at < end; at++)
      apply<RULE>(w, m, v, zeros, table.history[at + 1]);
  if (at >= to) return;
  const Step &begin = table.history[at], &end = table.history[to];
  const real decay = real(std::exp(end.sum_decay - begin.sum_decay));
  const real less1 = real(std::exp(end.sum1 - begin.sum1)), less2 = real(std::exp(end.sum2 - begin.sum2));
  for (int64_t d = 0; d < DIM; d++) {
    if (RULE == ADAM) w[d] *= decay;
    if (Row<RULE>::FIRST && m[d] != 0) m[d] *= less1;
    if (Row<RULE>::SECOND && v[d] != 0) v[d] *= less2;
  }
}

template <int RULE>
static void update_piece(const Table& table, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    if (i + AHEAD < end) {
      const int64_t ahead = table.row(i + AHEAD);
      prefetch_state(table, ahead);
      if (table.last) __builtin_prefetch(table.last + ahead, 1);
    }
    const int64_t row = table.row(i);
    Row<RULE> held(table, row);
    real g[DIM];
    load_row(table.grad + i * DIM, g);
    if (table.last) {
      replay<RULE>(table, table.last[row], table.now - 1, held.w, held.m, held.v);
      table.last[row] = int32_t(table.now);
    }
    apply<RULE>(held.w, held.m, held.v, g, table.history[table.now]);
    held.write(table, row);
  }
}

template <int RULE>
static void catch_up_row(const Table& table, int64_t row, int64_t from) {
  Row<RULE> held(table, row);
  replay<RULE>(table, from, table.now, held.w, held.m, held.v);
  held.write(table, row);
}

// Entries [begin, end) of the rows of a table.
template <int RULE>
static void catch_up_piece(const Table& table, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = table.row(i);
    if (table.rows && i + AHEAD < end) {
      const int64_t ahead = table.row(i + AHEAD);
      __builtin_prefetch(table.last + ahead, 1);
      prefetch_state(table, ahead);
    }
    int32_t from = __atomic_load_n(table.last + row, __ATOMIC_RELAXED);
    // one id may be in the hands of two threads: whoever moves `last` replays, the other goes on
    if (from < table.now && __atomic_compare_exchange_n(table.last + row, &from, int32_t(table.now), false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      catch_up_row<RULE>(table, row, from);
  }
}

using Piece = void (*)(const Table&, int64_t, int64_t);
static const Piece UPDATES[] = {update_piece<SGD>, update_piece<MOMENTUM>, update_piece<NESTEROV>,
                                update_piece<ADAGRAD>, update_piece<RMSPROP>, update_piece<ADAM>};
static const Piece CATCH_UPS[] = {catch_up_piece<SGD>, catch_up_piece<MOMENTUM>, catch_up_piece<NESTEROV>,
                                  catch_up_piece<ADAGRAD>, catch_up_piece<RMSPROP>, catch_up_piece<ADAM>};

static void run(Piece piece, const Table* tables, int64_t num_tables, int64_t num_threads) {
  std::vector<int64_t> first(num_tables + 1, 0);  // first piece of each table
  for (int64_t t = 0; t < num_tables; t++) {
    first[t + 1] = first[t] + (tables[t].size() + PIECE - 1) / PIECE;
  }
  #pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads) if (first[num_tables] > 4)
  for (int64_t p = 0; p < first[num_tables]; p++) {
    const int64_t t = std::upper_bound(first.begin(), first.end(), p) - first.begin() - 1;
    const int64_t begin = (p - first[t]) * PIECE;
    piece(tables[t], begin, std::min(begin + PIECE, tables[t].size()));
  }
}

// Index of the first table whose rows are not strictly ascending and inside it, or -1.
extern "C" int64_t heterps_first_unsorted(const Table* tables, int64_t num_tables) {
  for (int64_t t = 0; t < num_tables; t++) {
    const Table& table = tables[t];
    bool good = !table.count || (table.row(0) >= 0 && table.row(table.count - 1) < table.num_rows);
    for (int64_t i = 1; i < table.count; i++) good &= table.row(i - 1) < table.row(i);
    if (!good) return t;
  }
  return -1;
}

// One step on the rows with a gradient, which are strictly ascending. Rows are caught up first.
extern "C" void heterps_update(int64_t rule, const Table* tables, int64_t num_tables, int64_t num_threads) {
  run(UPDATES[rule], tables, num_tables, num_threads);
}

// Brings the given rows (all rows where table.rows is null) to step now. Rows may repeat. Returns 0, or 1 with nothing
// written if a row lies outside its table.
extern "C" int64_t heterps_catch_up(int64_t rule, const Table* tables, int64_t num_tables, int64_t num_threads) {
  bool good = true;
  for (int64_t t = 0; t < num_tables; t++)
    if (tables[t].rows)
      for (int64_t i = 0; i < tables[t].count; i++) good &= uint64_t(tables[t].row(i)) < uint64_t(tables[t].num_rows);
  if (!good) return 1;
  run(CATCH_UPS[rule], tables, num_tables, num_threads);
  return 0;
}
"""
