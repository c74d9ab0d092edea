"""C++ body of the update unit: optimizer steps on the rows that got a gradient, and catching up the rows that did
not.

One function, ``apply``, is one step of a rule for one row; a step without gradient is the same function with zeros. A
row that got none for k steps is caught up by replaying those k steps, so nothing is approximated but the tail: after
``horizon`` steps the momentum is below 1e-9 of what it was, stops moving the row, and only decays.

step         1   2   3   4   5   6        last[row] = 2: steps 3, 4, 5 are replayed when the row is read, gradient
*   *   .   .   .   *        or at the latest just before step 6 gives it a gradient

``history`` holds one ``Step`` per step of the table, from step 1 on, so rates may change from step to step.

float16 and bfloat16 are rounded after each operation, as torch's optimizers round them, also in the steps of a row
that waited: a factor of 0.999 often rounds away, so k roundings are not one. A row then has the same bits whenever it
is read. Two things torch rounds by position or layout are not followed: products in the last elements of a table that
do not fill a vector, and those of sparse gradients.
"""

from __future__ import annotations

STEP_FIELDS = ("rate", "bias2", "beta1", "beta2", "gain", "eps", "decay", "l1", "l2", "sum1", "sum2", "sum_decay")
"""Fields of the struct ``Step``, all float64."""

UPDATE = r"""
enum Rule { SGD, MOMENTUM, NESTEROV, ADAGRAD, RMSPROP, ADAM, SPARSE_ADAM, ROWWISE_ADAGRAD, FTRL };
struct Step {
  double rate, bias2, beta1, beta2;  // bias2: sqrt(1 - beta2**t), Adam only; beta1: also the momentum of SGD
  double gain;                       // what a gradient is multiplied by: -1 to maximize, 1 - dampening, ...
  double eps, decay;                 // decay: 1 - lr * weight_decay, decoupled (AdamW), else 1; eps: beta of FTRL
  double l1, l2;                     // FTRL only
  double sum1, sum2, sum_decay;      // sums of log beta1, log beta2, log decay over all steps up to this one
};
struct Table {
  scalar* weight;                    // (num_rows, DIM)
  void *first, *second;              // momentum and second moment as Row has them, null where the rule has none
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

template <class From>
static inline void load_all(const From* from, real* to, int64_t n) {
  for (int64_t d = 0; d < n; d++) to[d] = load(from[d]);
}
template <class To>
static inline void store_all(const real* from, To* to, int64_t n) {
  for (int64_t d = 0; d < n; d++) store(to + d, from[d]);
}

template <int RULE>
struct Row {  // a row in registers, written back when done
  static constexpr bool FIRST =
      RULE == MOMENTUM || RULE == NESTEROV || RULE == ADAM || RULE == SPARSE_ADAM || RULE == FTRL;
  static constexpr bool SECOND = RULE != SGD && RULE != MOMENTUM && RULE != NESTEROV;
  static constexpr int64_t WIDTH = RULE == ROWWISE_ADAGRAD ? 1 : DIM;  // numbers of the second moment
  // torch's optimizers keep state in the dtype of the table, our own in the dtype of sums
  using state = std::conditional_t<RULE == ROWWISE_ADAGRAD || RULE == FTRL, real, scalar>;
  real w[DIM], m[FIRST ? DIM : 1], v[SECOND ? WIDTH : 1];
  static state* first(const Table& table, int64_t row) { return static_cast<state*>(table.first) + row * DIM; }
  static state* second(const Table& table, int64_t row) { return static_cast<state*>(table.second) + row * WIDTH; }
  Row(const Table& table, int64_t row) {
    load_all(table.weight + row * DIM, w, DIM);
    if (FIRST) load_all(first(table, row), m, DIM);
    if (SECOND) load_all(second(table, row), v, WIDTH);
  }
  void write(const Table& table, int64_t row) {
    store_all(w, table.weight + row * DIM, DIM);
    if (FIRST) store_all(m, first(table, row), DIM);
    if (SECOND) store_all(v, second(table, row), WIDTH);
  }
  static void prefetch(const Table& table, int64_t row) {
    prefetch_row(table.weight + row * DIM);
    if (FIRST) prefetch_row(reinterpret_cast<const scalar*>(first(table, row)));
    if (SECOND && WIDTH == DIM) prefetch_row(reinterpret_cast<const scalar*>(second(table, row)));
    if (SECOND && WIDTH != DIM) __builtin_prefetch(second(table, row), 1);
  }
};

// a * b + c as BLAS has it, which torch calls to add sparse gradients: rounded once where the processor can.
static inline real fused(real a, real b, real c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// A number as the table's dtype holds it; itself for float and double.
static inline real rounded(real value) {
  scalar kept;
  store(&kept, value);
  return load(kept);
}

// Summed in a fixed order that vector units can follow.
static inline real mean_square(const real* g) {
  constexpr int64_t LANES = 8, WHOLE = DIM / LANES * LANES;
  real sums[LANES] = {}, sum = 0;
  for (int64_t d = 0; d < WHOLE; d += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += g[d + lane] * g[d + lane];
  for (int64_t d = WHOLE; d < DIM; d++) sum += g[d] * g[d];
  for (int64_t lane = 0; lane < LANES; lane++) sum += sums[lane];
  return sum / DIM;
}

// One step of a row: weight w, momentum m, second moment v, gradient g. Operations, and where they round, as in torch.
template <int RULE>
static inline void apply(real* w, real* m, real* v, const real* g, const Step& step) {
  constexpr bool OURS = RULE == ROWWISE_ADAGRAD || RULE == FTRL;  // computes in real throughout
  // torch adds a number after it took the dtype of the table
  const real rate = real(step.rate), eps = OURS ? real(step.eps) : rounded(real(step.eps)), gain = real(step.gain);
  const real beta1 = real(step.beta1), beta2 = real(step.beta2);
  const real rest1 = real(1 - step.beta1), rest2 = real(1 - step.beta2);
  if (RULE == SGD) {
    const real alpha = rounded(rate);  // torch adds with a factor of the dtype of the table
    for (int64_t d = 0; d < DIM; d++) w[d] = fused(-alpha, gain * g[d], w[d]);
  } else if (RULE == MOMENTUM || RULE == NESTEROV) {
    const real alpha = rounded(rate), part = rounded(gain), ahead = rounded(beta1);  // as above
    for (int64_t d = 0; d < DIM; d++) {
      m[d] = rounded(rounded(beta1 * m[d]) + part * g[d]);
      // beta2: sign of the plain gradient that Nesterov adds (1, or -1 to maximize)
      w[d] = rounded(w[d] - alpha * (RULE == NESTEROV ? rounded(beta2 * g[d] + ahead * m[d]) : m[d]));
    }
  } else if (RULE == ADAGRAD) {
    for (int64_t d = 0; d < DIM; d++) {
      v[d] = rounded(v[d] + g[d] * g[d]);
      w[d] = fused(-rate, gain * g[d] / rounded(rounded(std::sqrt(v[d])) + eps), w[d]);
    }
  } else if (RULE == RMSPROP) {
    for (int64_t d = 0; d < DIM; d++) {
      v[d] = rounded(rounded(v[d] * beta2) + rest2 * g[d] * g[d]);
      w[d] -= rate * (gain * g[d]) / rounded(rounded(std::sqrt(v[d])) + eps);
    }
  } else if (RULE == ADAM) {
    const real bias2 = real(step.bias2), decay = real(step.decay);
    for (int64_t d = 0; d < DIM; d++) {
      m[d] = rounded(m[d] + rest1 * (gain * g[d] - m[d]));
      v[d] = rounded(rounded(v[d] * beta2) + rest2 * g[d] * g[d]);
      const real below = rounded(rounded(rounded(std::sqrt(v[d])) / bias2) + eps);
      w[d] = rounded(rounded(w[d] * decay) - rate * m[d] / below);
    }
  } else if (RULE == SPARSE_ADAM) {  // eps is added before the bias is corrected; rate holds both corrections
    for (int64_t d = 0; d < DIM; d++) {
      m[d] = rounded(m[d] + rounded(rounded(gain * g[d] - m[d]) * rest1));
      v[d] = rounded(v[d] + rounded(rounded(rounded(g[d] * g[d]) - v[d]) * rest2));
      const real below = rounded(rounded(std::sqrt(v[d])) + eps);
      w[d] += rounded(-rate * rounded(m[d] / below));
    }
  } else if (RULE == ROWWISE_ADAGRAD) {  // one v for the row
    v[0] += mean_square(g);
    const real scale = gain * rate / (std::sqrt(v[0]) + eps);
    for (int64_t d = 0; d < DIM; d++) w[d] -= scale * g[d];
  } else {  // FTRL: m is rate * z, v is n, eps is beta
    const real l1 = real(step.l1), l2 = real(step.l2);
    for (int64_t d = 0; d < DIM; d++) {
      const real before = std::sqrt(v[d]);
      v[d] += g[d] * g[d];
      const real after = std::sqrt(v[d]);
      m[d] += rate * (gain * g[d]) - (after - before) * w[d];
      const real over = std::max(std::fabs(m[d]) - rate * l1, real(0));  // NaN stays NaN in this order
      const real moved = -std::copysign(over, m[d]) / (eps + after + rate * l2);
      w[d] = g[d] != 0 ? moved : w[d];
    }
  }
}

// Steps (from, to] of numbers that a step without gradient multiplies by a factor; log_sum: of its logarithms so far.
static void shrink(real* x, const Step* history, int64_t from, int64_t to, double Step::*factor,
                   double Step::*log_sum) {
  if (std::is_same<scalar, real>::value) {
    const real left = real(std::exp(history[to].*log_sum - history[from].*log_sum));
    for (int64_t d = 0; d < DIM; d++)
      if (x[d] != 0) x[d] *= left;
    return;
  }
  double resting = 1;  // a factor that rounds back to where the numbers are
  for (int64_t t = from + 1; t <= to; t++) {
    if (history[t].*factor == resting) continue;
    bool moved = false;
    for (int64_t d = 0; d < DIM; d++) {
      const real next = rounded(x[d] * real(history[t].*factor));
      moved |= next < x[d] || next > x[d];
      x[d] = next;
    }
    if (!moved) resting = history[t].*factor;
  }
}

// Whether rows or their state change without a gradient.
template <int RULE>
constexpr bool MOVES = RULE == MOMENTUM || RULE == NESTEROV || RULE == RMSPROP || RULE == ADAM;

// Steps (from, to] of a row without gradient, of a rule that MOVES.
template <int RULE>
static void replay(const Table& table, int64_t from, int64_t to, real* w, real* m, real* v) {
  if (from >= to) return;
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
  if (RULE == ADAM) shrink(w, table.history, at, to, &Step::decay, &Step::sum_decay);
  if (Row<RULE>::FIRST) shrink(m, table.history, at, to, &Step::beta1, &Step::sum1);
  if (Row<RULE>::SECOND) shrink(v, table.history, at, to, &Step::beta2, &Step::sum2);
}

template <int RULE>
static void update_piece(const Table& table, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    if (i + AHEAD < end) {
      const int64_t ahead = table.row(i + AHEAD);
      Row<RULE>::prefetch(table, ahead);
      if (table.last) __builtin_prefetch(table.last + ahead, 1);
    }
    const int64_t row = table.row(i);
    Row<RULE> held(table, row);
    real g[DIM];
    load_all(table.grad + i * DIM, g, DIM);
    if constexpr (MOVES<RULE>) {
      if (table.last) {
        replay<RULE>(table, table.last[row], table.now - 1, held.w, held.m, held.v);
        table.last[row] = int32_t(table.now);
      }
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
      Row<RULE>::prefetch(table, ahead);
    }
    int32_t from = __atomic_load_n(table.last + row, __ATOMIC_RELAXED);
    // one id may be in the hands of two threads: whoever moves `last` replays, the other goes on
    if (from < table.now && __atomic_compare_exchange_n(table.last + row, &from, int32_t(table.now), false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      catch_up_row<RULE>(table, row, from);
  }
}

using Piece = void (*)(const Table&, int64_t, int64_t);
static const Piece UPDATES[] = {update_piece<SGD>,         update_piece<MOMENTUM>,        update_piece<NESTEROV>,
                                update_piece<ADAGRAD>,     update_piece<RMSPROP>,         update_piece<ADAM>,
                                update_piece<SPARSE_ADAM>, update_piece<ROWWISE_ADAGRAD>, update_piece<FTRL>};
// No row waits under a rule that does not move it.
static const Piece CATCH_UPS[] = {nullptr, catch_up_piece<MOMENTUM>, catch_up_piece<NESTEROV>, nullptr,
                                  catch_up_piece<RMSPROP>, catch_up_piece<ADAM>};

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
