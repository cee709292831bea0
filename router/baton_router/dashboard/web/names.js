// Names of the workers as people read them: their own, as in their logs, else role and number in the list.

export function labels(workers) {
  const counts = {};
  const own = workers.map((worker) => worker.own_name);
  return new Map(
    workers.map((worker) => {
      const number = counts[worker.role] ?? 0;
      counts[worker.role] = number + 1;
      const unique = own.filter((name) => name === worker.own_name).length === 1;
      return [worker.name, worker.own_name && unique ? worker.own_name : `${worker.role}-${number}`];
    }),
  );
}

export function labelOf(named, name) {
  return named.get(name) ?? name;
}
