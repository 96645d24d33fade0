// The history of the open page: what two looks at the server's counters say about the time between them.

const KEPT = 600;
const WINDOW = 30; // seconds over which latencies are judged

// The value below which a share of a histogram's values lies; null without values.
export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, n) => sum + n, 0);
  if (!total) return null;
  let left = share * total;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] >= left) {
      const low = i ? bounds[i - 1] : 0;
      const high = i < bounds.length ? bounds[i] : low;
      return low + (high - low) * (counts[i] ? left / counts[i] : 0);
    }
    left -= counts[i];
  }
  return bounds[bounds.length - 1];
}

const since = (now, before) => now.counts.map((n, i) => Math.max(0, n - before.counts[i]));

export class Series {
  constructor() {
    this.looks = [];
    this.columns = { time: [], rate: [], prompt: [], first: [], first95: [], each: [], each95: [], running: [], waiting: [] };
  }

  // Takes a reply of /v1/overview. Counters that went down belong to a new engine or server, and begin again.
  add(look) {
    const last = this.looks[this.looks.length - 1];
    if (last && look.uptime_s < last.uptime_s) this.looks = [];
    this.looks.push(look);
    if (this.looks.length > WINDOW + 1) this.looks.shift();
    const oldest = this.looks[0];
    const seconds = last ? look.time - last.time : 0;
    const rate = (name) => (seconds > 0 ? Math.max(0, look.tokens[name] - last.tokens[name]) / seconds : 0);
    const times = (name, share) => {
      const histogram = look.latency[name];
      return quantile(histogram.bounds, since(histogram, oldest.latency[name]), share);
    };
    const row = {
      time: look.time,
      rate: rate("generated"),
      prompt: rate("prompt"),
      first: times("time_to_first_token", 0.5),
      first95: times("time_to_first_token", 0.95),
      each: times("inter_token", 0.5),
      each95: times("inter_token", 0.95),
      running: look.requests.running,
      waiting: look.requests.waiting,
    };
    for (const [name, column] of Object.entries(this.columns)) {
      column.push(row[name]);
      if (column.length > KEPT) column.shift();
    }
    return row;
  }
}
