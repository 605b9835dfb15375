'use strict';
// Curves of all runs, with uPlot. A chart joins the columns of its runs by the horizontal axis.
const Charts = (() => {
  const colours = ['#2f6fb5', '#c2571a', '#2b8a4b', '#8e5bb5', '#b5394f', '#7a6a1f', '#1f8c8c', '#6b6f76'];
  const kinds = [
    {id: 'loss', title: 'Loss, nats per token', columns: [['loss', 'step', 'time'], ['val_loss', 'eval_step', 'eval_time']], log: true},
    {id: 'bpb', title: 'Held-out bits per byte', columns: [['val_bpb', 'eval_step', 'eval_time']]},
    {id: 'rate', title: 'Learning rate', columns: [['learning_rate', 'step', 'time']]},
    {id: 'norm', title: 'Gradient norm', columns: [['grad_norm', 'step', 'time']]},
    {id: 'speed', title: 'Tokens per second', columns: [['tokens_per_s', 'step', 'time']]},
  ];
  const charts = new Map(); // by kind: {plot, figure, shape}
  const options = {axis: 'step', log: false};

  function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function colour(i) { return colours[i % colours.length]; }
  function number(v) {
    if (v === null || v === undefined) return '–';
    const a = Math.abs(v);
    return a !== 0 && (a < 1e-4 || a >= 1e6) ? v.toExponential(3).replace(/\.?0+e/, 'e') : String(+v.toPrecision(5));
  }

  // tables returns what uPlot.join takes: for each curve that has points, [x, y].
  function tables(kind, runs) {
    const found = [];
    for (const run of runs) {
      kind.columns.forEach(([name, step, time], part) => {
        const x = run.series[options.axis === 'step' ? step : time], y = run.series[name];
        if (!x || !x.length || !y.some(v => v !== null)) return;
        found.push({run, part, label: runs.length > 1 ? run.name + (part ? ' held-out' : '') : (part || name === 'val_bpb' ? 'held-out' : kind.id === 'loss' ? 'training' : kind.title.toLowerCase()), data: sorted(x, y)});
      });
    }
    return found;
  }

  // sorted drops points that do not follow those before: uPlot wants x to grow.
  function sorted(x, y) {
    let ordered = true;
    for (let i = 1; i < x.length; i++) if (!(x[i] > x[i - 1])) { ordered = false; break; }
    if (ordered) return [x, y];
    const a = [], b = [];
    for (let i = 0; i < x.length; i++) if (!a.length || x[i] > a[a.length - 1]) { a.push(x[i]); b.push(y[i]); }
    return [a, b];
  }

  function build(kind, figure, found, size) {
    const axis = {stroke: style('--soft'), grid: {stroke: style('--grid'), width: 1}, ticks: {stroke: style('--line')}};
    const series = [{label: options.axis === 'step' ? 'step' : 'seconds', value: (u, v) => number(v)}];
    for (const f of found) {
      series.push({label: f.label, stroke: f.part ? '#c2571a' : colour(f.run.index), width: f.part ? 2 : 1.3,
        dash: f.part && found.length > 2 ? [4, 3] : undefined, spanGaps: true, points: {show: f.part > 0 || f.data[0].length < 40, size: 5},
        value: (u, v) => number(v)});
      if (f.part && found.length > 2) series[series.length - 1].stroke = colour(f.run.index);
    }
    return new uPlot({width: size, height: 230, series, cursor: {sync: {key: 'kasmina'}},
      scales: {x: {time: false}, y: {distr: kind.log && options.log ? 3 : 1}},
      axes: [{...axis, size: 34}, {...axis, size: 64, values: (u, vals) => vals.map(v => v === null ? '' : number(v))}]},
      joined(found), figure.querySelector('div'));
  }

  function joined(found) {
    return found.length === 1 ? found[0].data : uPlot.join(found.map(f => f.data));
  }

  function draw(runs) {
    const holder = document.getElementById('charts');
    for (const kind of kinds) {
      const found = tables(kind, runs);
      let c = charts.get(kind.id);
      if (!found.length) {
        if (c) { sizes.unobserve(c.figure); c.plot.destroy(); c.figure.remove(); charts.delete(kind.id); }
        continue;
      }
      const shape = JSON.stringify([options, found.map(f => [f.label, f.part, f.run.index, f.data[0].length < 40])]);
      if (!c) {
        const figure = document.createElement('figure');
        const caption = document.createElement('figcaption');
        caption.textContent = kind.title;
        figure.id = 'chart-' + kind.id;
        figure.append(caption, document.createElement('div'));
        const after = kinds.slice(kinds.indexOf(kind) + 1).map(k => charts.get(k.id)).find(Boolean);
        holder.insertBefore(figure, after ? after.figure : null);
        c = {figure, plot: null, shape: ''};
        charts.set(kind.id, c);
        sizes.observe(figure);
      }
      if (c.shape !== shape) {
        if (c.plot) c.plot.destroy();
        c.plot = build(kind, c.figure, found, c.figure.clientWidth || 400);
        c.shape = shape;
      } else {
        c.plot.setData(joined(found));
      }
      const canvas = c.figure.querySelector('canvas'), last = found[0].data[1];
      canvas.setAttribute('role', 'img');
      canvas.setAttribute('aria-label', kind.title + ', the last is ' + number(last[last.length - 1]));
    }
  }

  // A figure's width changes with the window's, and when other figures come beside it.
  const sizes = new ResizeObserver(resize);

  function resize() {
    for (const c of charts.values()) {
      if (c.plot && c.plot.width !== c.figure.clientWidth) c.plot.setSize({width: c.figure.clientWidth, height: 230});
    }
  }

  function restyle() { for (const c of charts.values()) c.shape = ''; }

  // picture returns a canvas with all charts below each other.
  function picture() {
    const all = [...charts.values()];
    const canvas = document.createElement('canvas'), ratio = devicePixelRatio || 1, pad = 24 * ratio;
    canvas.width = Math.max(...all.map(c => c.plot.ctx.canvas.width));
    canvas.height = all.reduce((h, c) => h + c.plot.ctx.canvas.height + pad, 0);
    const g = canvas.getContext('2d');
    g.fillStyle = style('--panel');
    g.fillRect(0, 0, canvas.width, canvas.height);
    let y = 0;
    for (const c of all) {
      g.fillStyle = style('--text');
      g.font = 14 * ratio + 'px sans-serif';
      g.fillText(c.figure.querySelector('figcaption').textContent, 8 * ratio, y + 17 * ratio);
      g.drawImage(c.plot.ctx.canvas, 0, y + pad);
      y += pad + c.plot.ctx.canvas.height;
    }
    return canvas;
  }

  return {draw, restyle, picture, options, colour, number};
})();
