"""C++ of the look-ups backward: the gradient of the output becomes one row per distinct id of each table.

Sort, cut, sum::

    ids of a table    7 2 7 9 2 7      (row, position) pairs, sorted by row, positions kept in order
    sorted            2 2 7 7 7 9      cut into chunks of CHUNK pairs, whatever the number of threads
    chunks            2 2 7|7 7 9      each chunk sums its own pairs; a row that crosses a border is joined, in order
    rows, sums        2 7 9            the same bits for any number of threads, one hot row or many cold ones

Follows the text of ``cpu_lookup_source.py`` in its translation unit.
"""

from __future__ import annotations

GRADIENT = r"""
struct Job {  // all look-ups of one table
  int64_t first, last;       // its look-ups
  int64_t base, size;        // its pairs: keys[base, base + size)
  int64_t count;             // pairs left when those of padding, which sort last, are cut off
  int64_t first_piece, last_piece;
  int64_t chunk, rows;       // its first chunk; rows of the table, which is also the row number given to padding
  bool pooled, scaled, simple;
  const uint64_t* sorted;
  int64_t distinct;
};

struct Piece { int64_t job, lookup, begin, end; };  // ids of a look-up, or bags if it pools

struct Plan {
  std::vector<Fixed> fixed;
  std::vector<Call> calls;
  std::vector<int64_t> start;              // per look-up: position of its first id within its job
  std::vector<Job> jobs;
  std::vector<Piece> pieces;
  std::vector<int64_t> chunk_job, heads;   // per chunk: its job; rows that begin before it
  std::unique_ptr<uint64_t[]> keys, spare; // row << 32 | position within the job
  std::unique_ptr<uint32_t[]> bag;         // per position, when a job is pooled
  std::unique_ptr<real[]> factor;          // per position, when a job is scaled (weights, mean)
};

static inline uint32_t row_of(uint64_t key) { return uint32_t(key >> 32); }

// Bag and factor of the ids of one bag, positions [begin, end).
static void describe(Plan& plan, const Job& job, int64_t l, const int64_t* rows, int64_t bag, int64_t begin,
                     int64_t end) {
  const Call& call = plan.calls[l];
  const int64_t at = job.base + plan.start[l];
  int64_t used = 0;
  if (job.scaled && plan.fixed[l].mode == MEAN)
    for (int64_t k = begin; k < end; k++) used += rows[k - begin] != plan.fixed[l].padding;
  for (int64_t k = begin; k < end; k++) {
    plan.bag[at + k] = uint32_t(bag);
    if (job.scaled) plan.factor[at + k] = call.weights ? load(call.weights[k]) : used ? real(1) / real(used) : real(1);
  }
}

// The (row, position) pairs of ids [begin, end); returns how many are padding.
static int64_t pair_up(Plan& plan, const Job& job, int64_t l, const int64_t* rows, int64_t begin, int64_t end) {
  uint64_t* keys = plan.keys.get() + job.base + plan.start[l];
  int64_t padded = 0;
  for (int64_t k = begin; k < end; k++) {
    const bool padding = rows[k - begin] == plan.fixed[l].padding;
    padded += padding;
    keys[k] = uint64_t(padding ? job.rows : rows[k - begin]) << 32 | uint64_t(plan.start[l] + k);
  }
  return padded;
}

static void fill(Plan& plan, const Piece& piece, Fault* fault) {
  Job& job = plan.jobs[piece.job];
  const int64_t l = piece.lookup;
  const Fixed& fixed = plan.fixed[l];
  const Call& call = plan.calls[l];
  int64_t padded = 0;
  std::vector<int64_t> rows(1024);
  if (fixed.mode != NONE) {
    for (int64_t bag = piece.begin; bag < piece.end; bag++) {
      const int64_t begin = bag_begin(call, bag), end = bag_begin(call, bag + 1);
      if (end - begin > int64_t(rows.size())) rows.resize(end - begin);
      if (!read_rows(fixed, call, l, begin, end - begin, rows.data(), fault)) return;
      describe(plan, job, l, rows.data(), bag, begin, end);
      padded += pair_up(plan, job, l, rows.data(), begin, end);
    }
  } else {
    for (int64_t begin = piece.begin; begin < piece.end; begin += 1024) {
      const int64_t end = std::min(begin + 1024, piece.end);
      if (!read_rows(fixed, call, l, begin, end - begin, rows.data(), fault)) return;
      padded += pair_up(plan, job, l, rows.data(), begin, end);
      if (job.scaled)
        for (int64_t k = begin; k < end; k++) plan.factor[job.base + plan.start[l] + k] = 1;
    }
  }
  #pragma omp atomic
  job.count -= padded;
}

static int64_t largest_row(const Job& job) { return job.count < job.size ? job.rows : job.rows - 1; }
static int bits_of(int64_t row) { return 64 - __builtin_clzll(uint64_t(row) | 1); }

static void sort_alone(Plan& plan, Job& job) {
  uint64_t *from = plan.keys.get() + job.base, *to = plan.spare.get() + job.base;
  if (job.size < 512) {
    std::sort(from, from + job.size);  // the position in the low half keeps equal rows in order
  } else {
    const int bits = bits_of(largest_row(job)), passes = (bits + 10) / 11, digit = (bits + passes - 1) / passes;
    const uint64_t mask = (uint64_t(1) << digit) - 1;
    uint32_t place[2048];
    for (int shift = 32; shift < 32 + bits; shift += digit) {
      std::memset(place, 0, (mask + 1) * sizeof(uint32_t));
      for (int64_t i = 0; i < job.size; i++) place[(from[i] >> shift) & mask]++;
      uint32_t sum = 0;
      for (uint64_t k = 0; k <= mask; k++) { const uint32_t count = place[k]; place[k] = sum; sum += count; }
      for (int64_t i = 0; i < job.size; i++) to[place[(from[i] >> shift) & mask]++] = from[i];
      std::swap(from, to);
    }
  }
  job.sorted = from;
}

// The same sort with all threads of the team: counts and moves go by pieces, in the order of the pieces.
static void sort_together(Plan& plan, Job& job, std::vector<int64_t>& place) {
  uint64_t *from = plan.keys.get() + job.base, *to = plan.spare.get() + job.base;
  const int bits = bits_of(largest_row(job)), passes = (bits + 10) / 11, digit = (bits + passes - 1) / passes;
  const uint64_t mask = (uint64_t(1) << digit) - 1;
  const int64_t piece = 16384, pieces = (job.size + piece - 1) / piece;
  for (int shift = 32; shift < 32 + bits; shift += digit) {
    #pragma omp single
    place.assign(pieces * (mask + 1), 0);
    #pragma omp for schedule(static)
    for (int64_t p = 0; p < pieces; p++) {
      int64_t* mine = place.data() + p * (mask + 1);
      for (int64_t i = p * piece; i < std::min(job.size, (p + 1) * piece); i++) mine[(from[i] >> shift) & mask]++;
    }
    #pragma omp single
    {
      int64_t sum = 0;
      for (uint64_t k = 0; k <= mask; k++)
        for (int64_t p = 0; p < pieces; p++) {
          int64_t& entry = place[p * (mask + 1) + k];
          const int64_t count = entry; entry = sum; sum += count;
        }
    }
    #pragma omp for schedule(static)
    for (int64_t p = 0; p < pieces; p++) {
      int64_t* mine = place.data() + p * (mask + 1);
      for (int64_t i = p * piece; i < std::min(job.size, (p + 1) * piece); i++)
        to[mine[(from[i] >> shift) & mask]++] = from[i];
    }
    std::swap(from, to);
  }
  #pragma omp single
  job.sorted = from;
}

static inline int64_t chunks_of(const Job& job) { return (job.count + CHUNK - 1) / CHUNK; }

static void count_heads(Plan& plan, const Job& job, int64_t c) {
  const int64_t begin = c * CHUNK, end = std::min(begin + CHUNK, job.count);
  int64_t heads = 0;
  for (int64_t i = begin; i < end; i++) heads += i == 0 || row_of(job.sorted[i]) != row_of(job.sorted[i - 1]);
  plan.heads[job.chunk + c] = heads;
}

static void lay_out(Plan& plan, const int64_t* job_first) {
  int64_t base = 0, chunk = 0;
  bool pooled = false, scaled = false;
  for (size_t j = 0; j < plan.jobs.size(); j++) {
    Job& job = plan.jobs[j];
    job = Job{};
    job.first = job_first[j]; job.last = job_first[j + 1]; job.base = base; job.chunk = chunk;
    job.rows = plan.fixed[job.first].rows;
    job.first_piece = int64_t(plan.pieces.size());
    for (int64_t l = job.first; l < job.last; l++) {
      const Call& call = plan.calls[l];
      plan.start[l] = job.size;
      job.size += call.count();
      job.pooled |= plan.fixed[l].mode != NONE;
      job.scaled |= plan.fixed[l].mode == MEAN || call.weights;
      const int64_t piece = plan.fixed[l].mode == NONE ? 4096 : 512;
      for (int64_t begin = 0; begin < call.bags; begin += piece)
        plan.pieces.push_back({int64_t(j), l, begin, std::min(begin + piece, call.bags)});
    }
    job.last_piece = int64_t(plan.pieces.size());
    job.count = job.size;
    job.simple = !job.pooled && job.last == job.first + 1;
    pooled |= job.pooled; scaled |= job.scaled;
    base += job.size; chunk += (job.size + CHUNK - 1) / CHUNK;
    plan.chunk_job.resize(chunk, int64_t(j));
  }
  plan.heads.assign(chunk, 0);
  plan.keys.reset(new uint64_t[base + 1]);
  plan.spare.reset(new uint64_t[base + 1]);
  if (pooled) plan.bag.reset(new uint32_t[base + 1]);
  if (scaled) plan.factor.reset(new real[base + 1]);
}

// Sorts the ids of every table. distinct[j] is the number of rows table j gets a gradient for. null on a fault.
extern "C" Plan* heterps_plan(const Fixed* fixed, const Call* calls, int64_t num_lookups, const int64_t* job_first,
                              int64_t num_jobs, int64_t num_threads, int64_t* distinct, Fault* fault) {
  std::unique_ptr<Plan> plan(new Plan);
  plan->fixed.assign(fixed, fixed + num_lookups);
  plan->calls.assign(calls, calls + num_lookups);
  plan->start.assign(num_lookups, 0);
  plan->jobs.resize(num_jobs);
  lay_out(*plan, job_first);
  int64_t total = 0;
  for (const Job& job : plan->jobs) total += job.size;
  std::vector<int64_t> place;
  #pragma omp parallel num_threads(num_threads) if (total > 2048)
  {
    #pragma omp for schedule(dynamic, 1)
    for (int64_t j = 0; j < num_jobs; j++) {
      Job& job = plan->jobs[j];
      if (job.size > ALONE) continue;
      for (int64_t p = job.first_piece; p < job.last_piece; p++) fill(*plan, plan->pieces[p], fault);
      sort_alone(*plan, job);
      for (int64_t c = 0; c < chunks_of(job); c++) count_heads(*plan, job, c);
    }
    for (int64_t j = 0; j < num_jobs; j++) {
      Job& job = plan->jobs[j];
      if (job.size <= ALONE) continue;
      #pragma omp for schedule(dynamic, 1)
      for (int64_t p = job.first_piece; p < job.last_piece; p++) fill(*plan, plan->pieces[p], fault);
      sort_together(*plan, job, place);
      #pragma omp for schedule(static)
      for (int64_t c = 0; c < chunks_of(job); c++) count_heads(*plan, job, c);
    }
  }
  if (fault->status) return nullptr;
  for (int64_t j = 0; j < num_jobs; j++) {
    Job& job = plan->jobs[j];
    for (int64_t c = 0; c < chunks_of(job); c++) {
      const int64_t heads = plan->heads[job.chunk + c];
      plan->heads[job.chunk + c] = job.distinct;
      job.distinct += heads;
    }
    distinct[j] = job.distinct;
  }
  return plan.release();
}

extern "C" void heterps_plan_free(Plan* plan) { delete plan; }

// Where the sums of a table go: packed rows with their numbers, or straight into a dense gradient (rows == null).
struct Target { int64_t* rows; scalar* sums; int64_t by_frequency; };

static inline const scalar* grad_row(const Plan& plan, const Job& job, uint32_t position, int64_t* lookup) {
  int64_t l = job.first;
  while (l + 1 < job.last && position >= plan.start[l + 1]) l++;
  *lookup = l;
  const int64_t row = plan.fixed[l].mode == NONE ? position - plan.start[l] : plan.bag[job.base + position];
  return plan.calls[l].data + row * plan.calls[l].stride;
}

// Adds the gradients of pairs [begin, end), all of one row, to sums.
static void add_pairs(const Plan& plan, const Job& job, int64_t begin, int64_t end, real* sums) {
  const uint64_t* keys = job.sorted;
  if (job.simple) {
    const Call& call = plan.calls[job.first];
    for (int64_t i = begin; i < end; i++) {
      const scalar* grad = call.data + int64_t(uint32_t(keys[i])) * call.stride;
      for (int64_t d = 0; d < DIM; d++) sums[d] += load(grad[d]);
    }
    return;
  }
  for (int64_t i = begin; i < end; i++) {
    int64_t l;
    const uint32_t position = uint32_t(keys[i]);
    const scalar* grad = grad_row(plan, job, position, &l);
    if (plan.fixed[l].mode == MAX) {
      const int64_t* winners = plan.calls[l].winners + int64_t(plan.bag[job.base + position]) * DIM;
      for (int64_t d = 0; d < DIM; d++)
        if (winners[d] == position - plan.start[l]) sums[d] += load(grad[d]);
    } else if (job.scaled) {
      const real factor = plan.factor[job.base + position];
      for (int64_t d = 0; d < DIM; d++) sums[d] += load(grad[d]) * factor;
    } else {
      for (int64_t d = 0; d < DIM; d++) sums[d] += load(grad[d]);
    }
  }
}

static void write_sum(const Job& job, const Target& target, int64_t slot, int64_t row, int64_t count, real* sums) {
  if (target.by_frequency) for (int64_t d = 0; d < DIM; d++) sums[d] /= real(count);
  scalar* to = target.rows ? target.sums + slot * DIM : target.sums + row * DIM;
  if (target.rows) target.rows[slot] = row;
  for (int64_t d = 0; d < DIM; d++) store(to + d, sums[d]);
}

// What a chunk leaves for its neighbours: the sum of a row begun before it, and of the row that goes on after it.
struct Border { int64_t before, after; real head[DIM], tail[DIM]; };

static void sum_chunk(const Plan& plan, const Job& job, const Target& target, int64_t c, Border& border) {
  const uint64_t* keys = job.sorted;
  const int64_t begin = c * CHUNK, end = std::min(begin + CHUNK, job.count);
  int64_t slot = plan.heads[job.chunk + c], i = begin;
  border.before = border.after = 0;
  while (i < end) {
    const uint32_t row = row_of(keys[i]);
    int64_t next = i + 1;
    while (next < end && row_of(keys[next]) == row) next++;
    if (job.simple && i + AHEAD < end) {
      const Call& call = plan.calls[job.first];
      prefetch_row(call.data + int64_t(uint32_t(keys[i + AHEAD])) * call.stride);
    }
    const bool begun = i == begin && i > 0 && row_of(keys[i - 1]) == row;
    const bool goes_on = next == end && next < job.count && row_of(keys[next]) == row;
    real sums[DIM] = {};
    add_pairs(plan, job, i, next, sums);
    if (begun) { border.before = next - i; std::copy(sums, sums + DIM, border.head); }
    else if (goes_on) { border.after = next - i; std::copy(sums, sums + DIM, border.tail); slot++; }
    else write_sum(job, target, slot++, row, next - i, sums);
    i = next;
  }
}

// Joins the rows that cross chunk borders, chunk after chunk.
static void join_borders(const Plan& plan, const Job& job, const Target& target, const Border* borders) {
  for (int64_t c = 0; c < chunks_of(job); c++) {
    const Border& first = borders[job.chunk + c];
    if (!first.after) continue;
    real sums[DIM];
    std::copy(first.tail, first.tail + DIM, sums);
    int64_t count = first.after, next = c + 1;
    for (; next < chunks_of(job) && borders[job.chunk + next].before; next++) {
      const Border& border = borders[job.chunk + next];
      for (int64_t d = 0; d < DIM; d++) sums[d] += border.head[d];
      count += border.before;
      if (border.before < CHUNK) break;
    }
    const int64_t row = row_of(job.sorted[std::min(c * CHUNK + CHUNK, job.count) - 1]);
    write_sum(job, target, plan.heads[job.chunk + c + 1] - 1, row, count, sums);
  }
}

// Sums the gradients of every table of a plan into its target.
extern "C" void heterps_sum(const Plan* plan, const Target* targets, int64_t num_threads) {
  const int64_t chunks = int64_t(plan->chunk_job.size());
  int64_t total = 0;
  for (const Job& job : plan->jobs) total += job.count;
  std::unique_ptr<Border[]> borders(new Border[chunks + 1]);
  #pragma omp parallel for schedule(dynamic, 2) num_threads(num_threads) if (total > 2048)
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    const Job& job = plan->jobs[plan->chunk_job[chunk]];
    if (chunk - job.chunk < chunks_of(job))
      sum_chunk(*plan, job, targets[plan->chunk_job[chunk]], chunk - job.chunk, borders[chunk]);
  }
  for (size_t j = 0; j < plan->jobs.size(); j++) join_borders(*plan, plan->jobs[j], targets[j], borders.get());
}
"""
